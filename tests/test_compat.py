"""Both ends of the supported transformers versions behave the same through `specdec.compat`."""

import logging
import sys
import warnings

import torch
from transformers import DynamicCache
from transformers.utils import logging as transformers_logging

from specdec.checkpoints import load
from specdec.compat import attention_names, cache_argument, quiet_transformers
from specdec.config import TargetConfig
from specdec.progress import silent


class New(torch.nn.Module):
    def forward(self, input_ids, cache=None, **kwargs): ...


class Old(torch.nn.Module):
    def forward(self, input_ids, past_key_values=None, **kwargs): ...


def test_the_cache_argument_is_read_from_the_signature():
    assert cache_argument(New()) == "cache"
    assert cache_argument(Old()) == "past_key_values"


def test_the_installed_version_takes_its_cache():
    """A swallowed argument would leave our cache empty."""
    model = load(TargetConfig(name="tiny", source="tiny", device="cpu"), silent).model
    ids = torch.arange(6)[None]
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :4], **{cache_argument(model): cache})
    assert cache.get_seq_length() == 4
    rest = model(ids[:, 4:], **{cache_argument(model): cache})
    together = torch.cat([first.logits, rest.logits], 1)
    assert torch.allclose(together, model(ids).logits, atol=1e-5)


def test_attention_names():
    assert {"sdpa", "eager"} <= set(attention_names())


def test_quiet_holds_everything_back_and_restores(capfd):
    transformers_logging.set_verbosity(logging.INFO)
    try:
        with quiet_transformers():
            transformers_logging.get_logger("transformers.test").warning("a log line")
            warnings.warn("a warning", stacklevel=1)
            print("a bar", file=sys.stderr)
        assert transformers_logging.get_verbosity() == logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
