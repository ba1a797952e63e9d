"""GPT-2 in plain PyTorch, its Transformers classes and their configuration. Importing it registers the classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_gpt2small import GPT2SmallConfig
from .gpt import GPT
from .modeling_gpt2small import (
    GPT2SmallForCausalLM,
    GPT2SmallForQuestionAnswering,
    GPT2SmallForSequenceClassification,
    GPT2SmallForTokenClassification,
    GPT2SmallModel,
)

AutoConfig.register(GPT2SmallConfig.model_type, GPT2SmallConfig)
AutoModel.register(GPT2SmallConfig, GPT2SmallModel)
AutoModelForCausalLM.register(GPT2SmallConfig, GPT2SmallForCausalLM)
AutoModelForSequenceClassification.register(GPT2SmallConfig, GPT2SmallForSequenceClassification)
AutoModelForTokenClassification.register(GPT2SmallConfig, GPT2SmallForTokenClassification)
AutoModelForQuestionAnswering.register(GPT2SmallConfig, GPT2SmallForQuestionAnswering)

__all__ = [
    "GPT",
    "GPT2SmallConfig",
    "GPT2SmallForCausalLM",
    "GPT2SmallForQuestionAnswering",
    "GPT2SmallForSequenceClassification",
    "GPT2SmallForTokenClassification",
    "GPT2SmallModel",
]
