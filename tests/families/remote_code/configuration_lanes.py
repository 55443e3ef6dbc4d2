"""What a model's authors would ship: the configuration of a Laneformer."""

from transformers import PreTrainedConfig


class LanesConfig(PreTrainedConfig):
    model_type = "laneformer"

    def __init__(self, norm_eps=1e-5, rope_theta=10000.0, swa_layers=(), **fields):
        self.norm_eps, self.rope_theta, self.swa_layers = norm_eps, rope_theta, list(swa_layers)
        super().__init__(**fields)
