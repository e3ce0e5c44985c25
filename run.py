"""The command line: builds the configuration from `conf/` and hands it to one task of `experiments/`."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import conf
import experiments
from conf.command_line import command_line, reporting


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> None:
    with reporting():
        experiments.run(conf.resolve(cfg), Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    sys.exit(command_line(main))
