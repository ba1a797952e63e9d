# Copyright 2026 the authors of gpt2small_hf. Licensed under the Apache License, Version 2.0.
"""The model's Transformers classes: configuration, loss, cache, masks and generation around `gpt.py`.

No arithmetic is here. Users load this file, `gpt.py`, `cpu_linear.py` and `configuration_gpt2small.py`.
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack  # pyright: ignore[reportAttributeAccessIssue]
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_gpt2small import GPT2SmallConfig
from .cpu_linear import Linear
from .gpt import Attention, Block, Decoder, explicit_attention, init_weights, loss_without_logits


class GPT2SmallDecoderLayer(GradientCheckpointingLayer, Block):
    """The core's block, able to trade memory for recomputation, with linear layers that are faster on CPUs."""

    linear = Linear


class GPT2SmallPreTrainedModel(PreTrainedModel):
    """Base class: what the library needs to know of every model of this family."""

    config: GPT2SmallConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GPT2SmallDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": GPT2SmallDecoderLayer, "attentions": Attention}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # fully_shard replaces a model's class by one that it derives in a module of PyTorch, and the library saves the
        # code of the module that the class names: name ours. The class keeps its name, FSDP…, by which the library
        # recognises a sharded model; the configuration writes it without the prefix.
        if cls.__module__.startswith("torch."):
            cls.__module__ = cls.__bases__[-1].__module__

    def _init_weights(self, module: nn.Module) -> None:
        init_weights(module, self.config)

    def get_position_embeddings(self) -> nn.Embedding:
        """The learned embedding of each position of the context."""
        return self.base_model.embed_positions  # pyright: ignore[reportReturnType]

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Make the context longer, for further training, or shorter: old rows stay, new ones are initialised.

        Raises: ValueError unless the number is an integer of at least 1.
        """
        if not isinstance(new_num_position_embeddings, int) or new_num_position_embeddings < 1:
            raise ValueError(f"The context cannot be {new_num_position_embeddings!r} positions: give 1 or more.")
        self.config.max_position_embeddings = new_num_position_embeddings
        self.base_model.resize_positions()  # pyright: ignore[reportCallIssue]


class GPT2SmallModel(Decoder, GPT2SmallPreTrainedModel):
    """The decoder without a head: token ids → hidden states. Its parts and arithmetic are the core's `Decoder`."""

    block = GPT2SmallDecoderLayer

    def __init__(self, config: GPT2SmallConfig) -> None:
        GPT2SmallPreTrainedModel.__init__(self, config)
        self.build(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the core returns the hidden states alone
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Run the decoder.

        Args:
            input_ids: (B, T); either these or `inputs_embeds`.
            attention_mask: (B, past + T), 1 for real tokens and 0 for padding; or a ready mask (B, 1, T, past + T):
                true, or 0 to be added to the scores, where attention is allowed.
            position_ids: (B, T). Unset, they count the real tokens of `attention_mask`, so a padded row equals the
                same row alone. Ids that restart at 0 within a row, given without a mask and without a filled cache,
                separate packed documents: they do not attend to each other.
            past_key_values: cache of earlier positions, updated in place.
            inputs_embeds: (B, T, C) in place of `input_ids`.
            use_cache: return a cache, creating one if needed; unset, as the config says.
            kwargs: passed to the attention function.

        Raises: ValueError unless one of `input_ids` and `inputs_embeds` is given, or for positions beyond the context.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds, and not both.")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        places = positions(hidden_states, attention_mask, past_key_values) if position_ids is None else position_ids
        if not torch.compiler.is_compiling():
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            self._check_context(places, past + hidden_states.shape[1])
        # Only given position_ids can separate documents, and reading them synchronises the device.
        attention_mask, attend = self._attention(hidden_states, attention_mask, position_ids, past_key_values)
        # Pipeline parallelism puts an Identity in place of the layers of another stage, and passes a later stage its
        # hidden states as inputs_embeds: positions were added to them before.
        if not isinstance(self.layers[0], nn.Identity):
            hidden_states = self.add_positions(hidden_states, places)
        hidden_states = self.run_layers(
            hidden_states,
            depth=self.config.num_hidden_layers,  # lowered by the library for early exit
            attention_mask=attention_mask,
            position_ids=places,
            past_key_values=past_key_values,
            use_cache=use_cache,
            attend=attend,
            **kwargs,
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def _attention(
        self, hidden_states: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Any, Any]:
        """Return the causal mask and the function of the configured attention."""
        # The library detects restarting position_ids only without a cache: do not pass an empty one.
        if isinstance(cache, DynamicCache) and not cache.get_seq_length():
            cache = None
        mask = create_causal_mask(
            self.config, hidden_states, attention_mask=mask, past_key_values=cache, position_ids=position_ids
        )
        implementation = self.config._attn_implementation or "eager"
        adds_mask = implementation in ("eager", "flex_attention")  # to the scores
        if adds_mask and isinstance(mask, Tensor) and mask.dtype == torch.bool:
            dtype = hidden_states.dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return mask, ALL_ATTENTION_FUNCTIONS.get_interface(implementation, explicit_attention)

    def _check_context(self, position_ids: Tensor, length: int) -> None:
        limit = self.config.max_position_embeddings
        # Reading the ids synchronises the device: do it only if the row is long enough to exceed the limit.
        if length > limit and (last := int(position_ids.max())) >= limit:
            raise ValueError(
                f"The input reaches position {last + 1}, the model takes {limit} (max_position_embeddings). Shorten "
                "the prompt, ask for fewer new tokens, or use generate(..., custom_generate=model.sliding_window)."
            )


class GPT2SmallForCausalLM(GPT2SmallPreTrainedModel, GenerationMixin):
    """The language model: token ids → logits over the next token, loss when labels are given, and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # pyright: ignore[reportAssignmentType]
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: GPT2SmallConfig) -> None:
        super().__init__(config)
        self.model = GPT2SmallModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Score the next token at each position. Arguments are those of `GPT2SmallModel.forward` and:

        - `labels`: (B, T), not shifted: the token at t + 1 is the target of position t. -100 is ignored. Only labels
          select the loss, not `attention_mask`: with `labels=input_ids` padding counts too.
        - `logits_to_keep`: number of last positions, or the indices of positions, to compute logits for; 0 means all.
        - `skip_logits`: with labels, return the loss alone. Where PyTorch can (not while compiling, and only with an
          ordinary head), the logits of all positions then never exist at once.
        - `num_items_in_batch`: divides the summed loss.

        Returns: loss (nats per token) if labels are given, logits (B, kept, V) unless skipped, cache, and on request
            hidden states and attention weights.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        if labels is not None and skip_logits and self._can_skip_logits(hidden_states):
            loss = loss_without_logits(hidden_states, self.lm_head.weight, labels, **kwargs)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept, :])
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
                logits = None if skip_logits else logits
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    # `wraps`, because the library reads the names of the arguments.
    @wraps(GenerationMixin.prepare_inputs_for_generation)  # pyright: ignore[reportAttributeAccessIssue]
    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Prepare the arguments of `forward` for the next token. Raises: ValueError beyond the context."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        # With a static cache a step may be compiled, and cannot read its positions then.
        if (position_ids := inputs.get("position_ids")) is not None:
            self.model._check_context(position_ids, input_ids.shape[1])
        return inputs

    def _prepare_generated_length(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, generation_config: Any, has_default_max_length: bool, **kwargs: Any
    ) -> Any:
        # The model's own max_length keeps the pipeline, which asks for 256 new tokens, within a short context. Callers
        # of max_new_tokens have not set it, and need no warning that both are set.
        if generation_config.max_new_tokens is not None:
            has_default_max_length |= generation_config.max_length == self.generation_config.max_length
        return super()._prepare_generated_length(  # pyright: ignore[reportAttributeAccessIssue]
            generation_config=generation_config, has_default_max_length=has_default_max_length, **kwargs
        )

    def _can_skip_logits(self, hidden_states: Tensor) -> bool:
        # The chunked loss reads the head's weight and bypasses its forward. It cannot be used if the head is replaced
        # (an adapter, a quantised layer, a hook that fetches an offloaded weight) or its weight is sharded.
        head = self.lm_head
        return (
            hasattr(nn, "LinearCrossEntropyOptions")
            and not torch.compiler.is_compiling()
            and type(head) in (Linear, nn.Linear)
            and type(head.weight.data) is Tensor
            and head.weight.device == hidden_states.device
            and hidden_states.device.type != "meta"
            and not (head._forward_hooks or head._forward_pre_hooks or hasattr(head, "_hf_hook"))
            and not hasattr(self, "_loss_function")  # set by the user to another loss
        )

    @staticmethod
    def sliding_window(
        model: "GPT2SmallForCausalLM",
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Generate beyond the context: `model.generate(..., custom_generate=model.sliding_window)`, greedy or sampled.

        Each time the context is full, only its last half is kept and encoded again from position 0. Within the context
        the result equals that of plain `generate`. `generate` passes all arguments but streamer and `stop_strings`.

        Returns: (B, T + new) for `input_ids` (B, T) of any length.
        Raises: ValueError for other generation modes, and for outputs other than token ids.
        """
        if (
            (generation_config.num_beams or 1) > 1
            or generation_config.return_dict_in_generate
            or (generation_config.guidance_scale or 1) != 1
            or not input_ids.shape[1]
        ):
            raise ValueError(
                "A sliding window generates greedily or by sampling, from input_ids, and returns token ids: leave out "
                "num_beams, guidance_scale, return_dict_in_generate and inputs_embeds."
            )
        limit = model.config.max_position_embeddings
        # As a parameter, it would be the caller's mask, before the library creates a missing one.
        mask = kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        unfinished = torch.ones_like(input_ids[:, :1], dtype=torch.bool)  # (B, 1)
        begin, cache = 0, None
        while unfinished.any():
            length = input_ids.shape[1]
            if length - begin > limit:
                begin, cache = length - max(limit // 2, 1), None
            seen = begin if cache is None else length - 1
            outputs = model(
                input_ids[:, seen:],
                attention_mask=mask[:, begin:],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = outputs.past_key_values
            scores = logits_processor(input_ids, outputs.logits[:, -1].float())  # (B, V)
            if generation_config.do_sample:
                token = torch.multinomial(scores.softmax(-1), 1)
            else:
                token = scores.argmax(-1, keepdim=True)
            if not unfinished.all():
                token = torch.where(unfinished, token, generation_config._pad_token_tensor)
            input_ids = torch.cat([input_ids, token], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            unfinished &= ~stopping_criteria(input_ids, None)[:, None]
        return input_ids


class GPT2SmallModelWithHead(GPT2SmallPreTrainedModel):
    """The decoder, to which a subclass adds the head of a task.

    The library's generic heads create their base model by an Auto class, which asks again before it loads remote code.
    Their losses do not divide by `num_items_in_batch`, which the Trainer assumes of a forward with **kwargs.
    """

    accepts_loss_kwargs = False

    def __init__(self, config: GPT2SmallConfig) -> None:
        GPT2SmallPreTrainedModel.__init__(self, config)
        self.model = GPT2SmallModel(config)
        self.num_labels: int = config.num_labels  # pyright: ignore[reportAttributeAccessIssue]  # two unless set


class GPT2SmallForSequenceClassification(GenericForSequenceClassification, GPT2SmallModelWithHead):
    """A label, or a number, for a whole text, read at its last token that is not padding."""

    def __init__(self, config: GPT2SmallConfig) -> None:
        GPT2SmallModelWithHead.__init__(self, config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class GPT2SmallForTokenClassification(GenericForTokenClassification, GPT2SmallModelWithHead):
    """A label for each token, from the tokens up to it."""

    def __init__(self, config: GPT2SmallConfig) -> None:
        GPT2SmallModelWithHead.__init__(self, config)
        self.dropout = nn.Dropout(config.resid_pdrop)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()


class GPT2SmallForQuestionAnswering(GenericForQuestionAnswering, GPT2SmallModelWithHead):
    """Where the answer to a question starts and ends in a text."""

    def __init__(self, config: GPT2SmallConfig) -> None:
        GPT2SmallModelWithHead.__init__(self, config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


def positions(hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None) -> Tensor:
    """Position of each token among the real ones of its row: (B or 1, T).

    A padded row then gets the positions it would have alone, in `generate` and in a plain call.
    """
    T = hidden_states.shape[1]
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    here = torch.arange(T, device=hidden_states.device) + past
    if attention_mask is None or len(attention_mask.shape) != 2:  # flex attention's own masks have no ndim
        return here.unsqueeze(0)
    counted = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    if getattr(past_key_values, "is_compileable", False):  # a cache of fixed size: the mask may be as wide as it is
        return counted[:, here.clamp(max=attention_mask.shape[1] - 1)]
    return counted[:, -T:]


GPT2SmallModel.register_for_auto_class("AutoModel")
GPT2SmallForCausalLM.register_for_auto_class("AutoModelForCausalLM")
GPT2SmallForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
GPT2SmallForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
GPT2SmallForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
