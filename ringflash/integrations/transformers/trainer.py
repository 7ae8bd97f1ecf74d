"""RingTraining: what a Trainer must do otherwise when several processes share a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringflash.integrations.transformers.inputs import cut_batch
from ringflash.integrations.transformers.proof import check_model
from ringflash.ring import Ring
from ringflash.training.loss import count_tokens, sum_over_ranks


class RingTraining:
    """A mixin for transformers.Trainer and what is made of it; the collator and all else stay as they are.

        class LongTrainer(RingTraining, Trainer):
            pass

        trainer = LongTrainer(ring=rf.Ring(), model=model, args=args, ...)

    ring: ranks of consecutive processes, such as Ring(), or Ring(mesh["cp"]) of a mesh ("dp", "cp"). Other processes are
        data parallelism as ever: per_device_train_batch_size is then that of a ring.

    Every rank of a ring reads the same batches, and takes its part of each when the loss is computed. Losses that are
    logged and evaluated, and gradients, are those of one process: backward starts from ring.ranks times transformers' own
    loss, whose denominator counts the whole batch once for every rank of the ring.

    Errors: ValueError and NotImplementedError, on creation, for a model whose layers do not get the ring (`check_model`),
    processes that the ring does not divide, and for what would look at a part of the sequence as if it were all:
    label_smoothing_factor, compute_loss_func, compute_metrics, parallelism_config, neftune_noise_alpha.
    """

    def __init__(self, *args: Any, ring: Ring, **kwargs: Any) -> None:
        if not isinstance(ring, Ring):
            raise TypeError(f"RingTraining: ring is {type(ring).__name__}; must be a Ring")
        self.ring = ring
        self._was_evaluated, self._was_trained = False, False
        super().__init__(*args, **kwargs)
        self._check_settings()
        made: Any = self.model  # type: ignore[attr-defined]
        # FSDP may load weights on one process of a host, which then checks for all.
        if not any(weight.is_meta for weight in made.parameters()):
            check_model(made)

    def get_train_dataloader(self) -> Any:
        return self._by_ring(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._by_ring(super().get_eval_dataloader(eval_dataset))  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._by_ring(super().get_test_dataloader(test_dataset))  # type: ignore[misc]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **more: Any,
    ) -> Any:
        part = cut_batch(inputs, self.ring)
        if "shift_labels" not in part:
            raise ValueError(f"RingTraining: the batch has {', '.join(inputs)}; must have labels or shift_labels")
        if num_items_in_batch is None:  # transformers before 5 counts no tokens in evaluation
            count = count_tokens(part["shift_labels"], self.ring, averaged_over=1).count
            outputs = model(**part, num_items_in_batch=count)
            loss = outputs["loss"]
        else:
            loss, outputs = super().compute_loss(  # type: ignore[misc]
                model, part, return_outputs=True, num_items_in_batch=num_items_in_batch, **more
            )
        if getattr(outputs, "aux_loss", None) is not None:
            raise NotImplementedError(
                "RingTraining: the model adds a loss that balances experts, which is no sum over tokens; set "
                "config.output_router_logits = False"
            )
        # Each rank holds a part of the sum, and the count of every rank of the ring is in its denominator.
        loss = loss * self.ring.ranks
        if not torch.is_grad_enabled():
            # Evaluation keeps the losses of some processes and drops others': each must have the whole of its ring.
            loss = sum_over_ranks(loss, (self.ring.transport,)) / self.ring.ranks
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not prediction_loss_only and self.ring.ranks > 1:
            raise NotImplementedError(
                "RingTraining: predictions are asked for, and each rank has those of its part of the sequence; evaluate() "
                "gives the loss. For predictions call the model without a ring"
            )
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self._was_evaluated and not self._was_trained:
            self._forget_evaluation()
        self._was_trained = True
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _forget_evaluation(self) -> None:
        """accelerate takes a model prepared for evaluation for one prepared to train, whose gradients then stay apart."""
        trainer: Any = self
        if getattr(trainer, "is_fsdp_enabled", False):
            raise NotImplementedError(
                "RingTraining: evaluate() before the first train() under FSDP would leave the model as it was made for "
                "evaluation; set eval_on_start = True instead, or train first"
            )
        prepared = trainer.accelerator._models
        prepared[:] = [model for model in prepared if model is not trainer.model]
        trainer.model._is_accelerate_prepared = False
        trainer.model_wrapped = trainer.model  # where it was compiled, evaluation has left that here

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._was_evaluated = True
        if self.ring.ranks > 1:
            self.gather_function = self._one_of_each_ring
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _one_of_each_ring(self, losses: Tensor) -> Tensor:
        """Losses of the batch as data parallelism alone would gather them, without what fills up the last batch."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        by_process = accelerator.gather(losses).view(accelerator.num_processes, -1)
        gathered: Tensor = by_process[:: self.ring.ranks].flatten()
        state = accelerator.gradient_state
        return gathered[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else gathered

    def _check_settings(self) -> None:
        trainer: Any = self
        args = trainer.args
        given = {
            "label_smoothing_factor": args.label_smoothing_factor,
            "compute_loss_func": trainer.compute_loss_func,
            "compute_metrics": trainer.compute_metrics,
            "parallelism_config": getattr(args, "parallelism_config", None),
            "neftune_noise_alpha": getattr(args, "neftune_noise_alpha", None),
        }
        for name, value in given.items():
            if value:
                raise NotImplementedError(
                    f"RingTraining: {name} = {value!r}; must be left out, because it would work on a part of the sequence "
                    "as if it were the whole"
                )
        if args.n_gpu > 1:
            raise ValueError(f"RingTraining: one process has {args.n_gpu} GPUs; must be one each, start with torchrun")
        processes, index = trainer.accelerator.num_processes, trainer.accelerator.process_index
        if processes % self.ring.ranks or index % self.ring.ranks != self.ring.rank:
            raise ValueError(
                f"RingTraining: process {index} of {processes} is rank {self.ring.rank} of {self.ring.ranks} in its ring; "
                "rings must be of consecutive processes, and all alike: Ring(), or Ring(mesh['cp']) of a mesh ('dp', 'cp')"
            )
        if not trainer.model_accepts_loss_kwargs:
            raise ValueError(
                "RingTraining: the model's forward takes no keyword arguments such as ring; must take **kwargs"
            )

    def _by_ring(self, loader: Any) -> Any:
        """Let all ranks of a ring read what accelerate would deal to one process."""
        from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        if accelerator.num_processes == 1:
            return loader
        for dealer in (getattr(loader, "batch_sampler", None), loader.dataset):
            if isinstance(dealer, (BatchSamplerShard, IterableDatasetShard)):
                dealer.num_processes = accelerator.num_processes // self.ring.ranks
                dealer.process_index = accelerator.process_index // self.ring.ranks
                if dealer.num_processes == 1:
                    dealer.even_batches = False  # one process alone fills no last batch up either
                return loader
        raise NotImplementedError(
            f"RingTraining: {type(loader).__name__} does not say how it deals batches to processes; must be accelerate's "
            "loader with accelerator_config={'dispatch_batches': False}"
        )
