"""Fields that a chat template drops."""

from aerie.chat.template import ChatTemplate
from support.chat import TALK, TOOLS, WORK, answer, chat_of, make_tokenizer, user


def test_dropped_fields_of_templates_without_calls():
    talk = [{"role": "system", "content": "Be brief."}, *WORK]
    assert chat_of("chatml").dropped_fields(talk, TOOLS) == [
        "tools",
        "reasoning_content",
        "tool_calls",
    ]
    assert chat_of("llama3").dropped_fields(talk, TOOLS) == ["tools", "reasoning_content"]
    assert chat_of("chatml").dropped_fields(TALK) == []
    assert chat_of("stripping").dropped_fields([user(" a "), answer("\nb")]) == []
    silent = "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    silent += "{{ m.content[:5] }}<|im_end|>\n{% endif %}{% endfor %}"
    chat = ChatTemplate(make_tokenizer("bytes", "chatml", silent))
    assert chat.dropped_fields(talk) == ["system", "content", "reasoning_content", "tool_calls"]
