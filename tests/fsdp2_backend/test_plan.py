"""The trainer's layouts for `rlcore plan`."""

from rlcore.testing.plans import TrainerPlans
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.plan import plan


class TestPlans(TrainerPlans):
    plan = staticmethod(plan)
    config = Fsdp2Config
