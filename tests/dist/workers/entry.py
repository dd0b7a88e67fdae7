"""``dflop_ds.train`` on a configuration file, without the launcher."""

import sys

from dflop_ds.train import run
from tests.support.training import worker_arguments

sys.argv[1:] = ["--deepspeed_config", worker_arguments()["config_path"]]
run()
