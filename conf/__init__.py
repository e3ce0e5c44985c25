"""The command line's configuration: YAML groups here, their schema in `specdec/config.py`."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import drafters
from specdec.config import Config, explain

ConfigStore.instance().store(name="schema", node=Config)


def resolve(cfg: DictConfig) -> Config:
    """The composed configuration as checked dataclasses.

    Raises:
        OptionError: an option is unknown, missing, of a wrong type or of an impossible value.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(config, Config)
    config.drafter = drafters.check(config.drafter)
    return config
