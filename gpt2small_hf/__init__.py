"""Train a GPT-2-small-class model from scratch and share it so that transformers loads it in one line.

Importing this package registers its classes: `AutoModelForCausalLM.from_pretrained(folder)` then needs no remote code.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.model.gpt import GPT
from gpt2small_hf.model.modeling_gpt2small import (
    GPT2SmallForCausalLM,
    GPT2SmallForQuestionAnswering,
    GPT2SmallForSequenceClassification,
    GPT2SmallForTokenClassification,
    GPT2SmallModel,
)
from gpt2small_hf.peft_targets import register as register_peft_targets

AutoConfig.register(GPT2SmallConfig.model_type, GPT2SmallConfig)
AutoModel.register(GPT2SmallConfig, GPT2SmallModel)
AutoModelForCausalLM.register(GPT2SmallConfig, GPT2SmallForCausalLM)
AutoModelForSequenceClassification.register(GPT2SmallConfig, GPT2SmallForSequenceClassification)
AutoModelForTokenClassification.register(GPT2SmallConfig, GPT2SmallForTokenClassification)
AutoModelForQuestionAnswering.register(GPT2SmallConfig, GPT2SmallForQuestionAnswering)
register_peft_targets()

__all__ = [
    "GPT",
    "GPT2SmallConfig",
    "GPT2SmallForCausalLM",
    "GPT2SmallForQuestionAnswering",
    "GPT2SmallForSequenceClassification",
    "GPT2SmallForTokenClassification",
    "GPT2SmallModel",
]
