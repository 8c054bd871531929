"""Pretrains a GPT with Megatron's own training loop, as megatron-core from PyPI brings it, with or without MEMO.

    torchrun --nproc-per-node 8 pretrain_gpt.py <Megatron's flags> --memo

For what this script does not build (mixture of experts, fine-tuning data, fill-in-the-middle, knowledge distillation, context parallelism) launch
the pretrain_gpt.py of a Megatron-LM checkout: python -m megatron_memo.launch PATH/pretrain_gpt.py <flags>.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Dict, Iterator, Optional, Tuple

from megatron_memo import launch
from megatron_memo.errors import ConfigError
from megatron_memo.report import live_bytes

if __name__ == "__main__":
    launch.prepare_or_exit(sys.argv[1:])  # before Megatron is imported

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

_BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_NOT_BUILT = {
    "num_experts": "--num-experts",
    "sft": "--sft",
    "fim_data": "--fim-data",
    "logits_load_dir": "--logits-load-dir",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "experimental_attention_variant": "--experimental-attention-variant",
    "mtp_num_layers": "--mtp-num-layers",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
}


def refuse_what_is_not_built(args: Any) -> None:
    """Raises ConfigError for flags whose models or data this script does not make."""
    flags = [flag for name, flag in _NOT_BUILT.items() if getattr(args, name, None)]
    if args.context_parallel_size > 1:
        flags.append("--context-parallel-size")
    if flags:
        raise ConfigError(
            f"this pretrain_gpt.py does not build what {', '.join(flags)} asks for. Launch Megatron-LM's own: "
            "python -m megatron_memo.launch PATH/pretrain_gpt.py <the same flags>."
        )


def next_batch(data_iterator: Iterator[Dict[str, torch.Tensor]]) -> Dict[str, Optional[torch.Tensor]]:
    """tokens, labels, loss_mask, position_ids [b, s] (and attention_mask or None) of the next micro-batch, on the device.

    Every tensor-parallel rank reads the samples itself: the data set is a memory map, and all ranks of a group draw the same ones.
    """
    batch = next(data_iterator)
    return {name: batch[name].cuda(non_blocking=True) if batch.get(name) is not None else None for name in _BATCH}


def masked_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, Dict[str, torch.Tensor]]:
    """The summed loss of the tokens that count, their number, and both for the log. ``losses`` and ``loss_mask`` are [b, s]."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for wrong, name in ((torch.isnan, "not a number"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=wrong, message=f"the loss of a forward pass is {name}", tolerance=0.0, fatal=True
            )
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Iterator[Dict[str, torch.Tensor]], model: torch.nn.Module) -> Tuple[torch.Tensor, Any]:
    """One micro-batch through the model: its losses [b, s] and the function that sums them."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = next_batch(data_iterator)
    timer.stop()
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"], loss_mask=batch["loss_mask"])
    return losses, partial(masked_loss, batch["loss_mask"])


def datasets(samples: Any, vp_stage: Optional[int] = None) -> Tuple[Any, Any, Any]:
    """Training, validation and test data sets of at least ``samples`` samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, lambda: True, config).build()


datasets.is_distributed = True


def main() -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_what_is_not_built(args)
    live_bytes.install_from_environment()
    pretrain(pretrain_cfg_container_from_args(args, gpt_config_from_args(args)), datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    launch.run_or_exit(main)
