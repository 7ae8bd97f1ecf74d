"""Trains with transformers' Trainer for three steps: `python -m tests.integrations.train_over_ring OUT PROCESSES RUN...`.

A RUN is RANKS:BATCH:WHERE, with rings of so many ranks, whose tokens are counted "across" processes or in "each". Process 0
saves losses and weights. Processes are forked when all is imported, which takes each of them seconds otherwise.
"""

import multiprocessing
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, logging

import ringflash as rf
from ringflash.integrations.transformers import RingTraining, register

DOCUMENTS = 24


class RingTrainer(RingTraining, Trainer):
    pass


def examples():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 40, (DOCUMENTS,), generator=generator).tolist()
    return [{"input_ids": torch.randint(64, (n,), generator=generator).tolist()} for n in lengths]


def model(attention="ring", **facts):
    register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation=attention, **facts))


def arguments(folder, batch, **more):
    settings = {
        "output_dir": folder, "use_cpu": True, "disable_tqdm": True, "report_to": [], "save_strategy": "no",
        "per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "gradient_accumulation_steps": 2,
        "max_steps": 3, "logging_steps": 1, "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd",
    }  # fmt: skip
    return TrainingArguments(**{**settings, **more})


def train(kind, batch, attention="ring", uneven=True, settings=None, first=False, **more):
    """{"train": losses, "eval": losses of 8 and, where processes share no batch, of 9 documents, "weights": ...}."""
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model=model(attention),
            args=arguments(folder, batch, **(settings or {})),
            train_dataset=examples(),
            eval_dataset=examples()[:8],
            data_collator=DataCollatorWithFlattening(),
            **more,
        )
        if first:
            trainer.evaluate()
        trainer.train()
        evaluated = [trainer.evaluate()["eval_loss"]]
        if uneven:
            evaluated.append(trainer.evaluate(examples()[:9])["eval_loss"])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "train": losses,
        "eval": evaluated,
        "weights": {k: v.detach() for k, v in trainer.model.state_dict().items()},
    }


def work(rank, processes, store, path, runs):
    # By these accelerate knows that it is one of several; nobody meets at the address, for the group is there already.
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group("gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes)
    results = {}
    for name in runs:
        ranks, batch, where = name.split(":")
        ranks, batch = int(ranks), int(batch)
        mesh = init_device_mesh("cpu", (processes // ranks, ranks), mesh_dim_names=("dp", "cp"))
        settings, first = {"average_tokens_across_devices": where != "each"}, "evaluated" in where
        if "compiled" in where:
            settings |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        ring = rf.Ring(mesh["cp"])
        results[name] = train(RingTrainer, batch, ring=ring, uneven=ranks == processes, settings=settings, first=first)
    if rank == 0:
        torch.save(results, path)
    dist.destroy_process_group()


def main():
    path, processes, *runs = sys.argv[1:]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (int(processes), f"{folder}/store", path, runs)
        workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(int(processes))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    sys.exit(max(abs(worker.exitcode) for worker in workers))


if __name__ == "__main__":
    main()
