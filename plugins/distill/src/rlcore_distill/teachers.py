"""The teachers of a run behind endpoints, as one column of log-probabilities."""

from collections.abc import Mapping

import numpy as np

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_distill.config import TeacherConfig
from rlcore_torchkit.rl.endpoint_logprobs import EndpointModel, decoder_of, require_scorable, require_temperature

SECTION = "algorithm.distill.teachers"


class Teachers:
    """Several teachers with weights w_k that sum to 1.

    Σ_k w_k KL(policy ‖ teacher_k) = E[log policy - Σ_k w_k log teacher_k], so that the weighted mean of their log-probabilities
    stands for one teacher's.
    """

    def __init__(self, teachers: Mapping[str, TeacherConfig], context: spi.AlgorithmContext) -> None:
        """ConfigError where the run samples otherwise than at the temperature that endpoints score at."""
        require_temperature(context)
        self._model = context.model
        self._configs = teachers
        self._total = sum(config.weight for config in teachers.values())
        self._teachers: dict[str, EndpointModel] = {}

    def column(self, batch: spi.TokenBatch) -> tuple[Float32Array, dict[str, float]]:
        """float32 [T] of Σ_k w_k log teacher_k, 0.0 outside the loss mask, and of several teachers the metrics
        `reverse_kl/NAME`: the mean of generation - teacher_k over the loss tokens."""
        column, metrics = np.zeros(batch.num_tokens, np.float32), dict[str, float]()
        if not batch.tokens.any():  # the made-up samples of a check, which asks no endpoint
            return column, metrics
        require_scorable(batch, SECTION, "Take a teacher in [reference]")
        if not self._teachers:
            decode = decoder_of(self._model)
            self._teachers = {
                name: EndpointModel(f"{SECTION}.{name}", config, decode) for name, config in self._configs.items()
            }
        generated = batch.token_columns[spi.GENERATION_LOGPROBS]
        for name, teacher in self._teachers.items():
            found = teacher.logprobs(batch)
            column += np.float32(self._configs[name].weight / self._total) * np.where(batch.loss_mask, found, np.float32(0))
            if len(self._teachers) > 1:
                gaps = (generated - found)[batch.loss_mask].astype(np.float64)
                metrics[f"reverse_kl/{name}"] = float(gaps.mean()) if len(gaps) else 0.0
        return column, metrics
