import torch
from torch.optim import _muon

from aerie.drafter.muon import orthogonalize


def test_float32_muon_iterates_as_torch_does():
    torch.manual_seed(0)
    for shape in ((64, 96), (96, 64)):
        gradient = torch.randn(shape)
        ours = orthogonalize(gradient, (3.4445, -4.775, 2.0315), 5, 1e-7)
        theirs = _muon._zeropower_via_newtonschulz(gradient, (3.4445, -4.775, 2.0315), 5, 1e-7)
        # torch's own is in bf16.
        assert torch.allclose(ours, theirs.float(), atol=0.05)
