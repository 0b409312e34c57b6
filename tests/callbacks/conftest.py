# The DataModule and LightningModule of the datamodules' tests serve here too.
from datamodules.conftest import make_data, make_module, make_trainer, tiny_actor_critic  # noqa: F401
