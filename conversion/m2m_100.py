"""M2M100 (Fan et al. 2021, arXiv 2010.11125) and, of the same class, the dense NLLB models (arXiv 2207.04672)."""

from transformers import PreTrainedConfig

from metaphrase.conversion.sinusoidal import Sinusoidal
from metaphrase.modeling import MetaphraseConfig


class M2M100(Sinusoidal):
    """Pre-norm, with fairseq's sinusoids, which its class makes anew and never reads."""

    name = "m2m_100"
    config_class = "M2M100Config"
    model_class = "M2M100ForConditionalGeneration"
    layout = "fairseq"
    reads_table = False
    has_logits_bias = False
    fixed = Sinusoidal.fixed | {"norm_position": "pre", "final_norm": True}
    ignored = (
        *Sinusoidal.ignored,
        *(f"model.{stack}.embed_positions.weights" for stack in ("encoder", "decoder")),
    )

    def position_offset(self, config: PreTrainedConfig | MetaphraseConfig) -> int:
        return (config.pad_token_id or 0) + 1
