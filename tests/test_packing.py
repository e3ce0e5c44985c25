"""Packed layers against float64 products, and who must not be served by them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specdec.packing import FEW, PackedLinear, can_pack, pack

pytestmark = pytest.mark.skipif(
    not can_pack(nn.Linear(1, 1, dtype=torch.bfloat16)), reason="this CPU does not multiply bfloat16"
)


def layer(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 25), (3, 7), (1, FEW), (2, FEW)])
def test_it_multiplies(shape, bias):
    """Within bfloat16's rounding of the result (2^-8) of the product in float64."""
    module = layer(bias)
    x = torch.randn(*shape, 96).bfloat16()
    weight, offset = module[0].weight.double(), module[0].bias.double() if bias else None
    expected = F.linear(x.double(), weight, offset)
    assert pack(module) == 1 and type(module[0]) is PackedLinear
    with torch.inference_mode():
        got = module(x).double()
    assert got.shape == expected.shape
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 1e-3).all()


def test_packing_twice_is_packing_once():
    module = layer()
    assert pack(module) == pack(module) == 1


def test_a_copy_in_training_uses_its_own_weights():
    """A deep copy's weight changes; the packed one of its original must not answer for it."""
    module = layer()
    pack(module)
    trained = copy.deepcopy(module)
    with torch.no_grad():
        trained[0].weight.add_(1.0)
        x = torch.ones(1, 96, dtype=torch.bfloat16)
        assert (trained(x) - module(x)).float().mean() == pytest.approx(96, rel=0.02)


def test_gradients_flow():
    module = layer()
    pack(module)
    module(torch.ones(2, 96, dtype=torch.bfloat16)).sum().backward()
    assert (module[0].weight.grad == 2).all()


def test_other_precisions_stay_plain():
    module = nn.Sequential(nn.Linear(4, 4))
    assert not can_pack(module) and pack(module) == 0 and type(module[0]) is nn.Linear
