"""Fine-tune a Hugging Face model on packed documents, each batch cut across processes. It downloads nothing.

    python examples/05_huggingface_packed.py
    torchrun --standalone --nproc-per-node 2 examples/05_huggingface_packed.py

Both print the same losses, to rounding:

    1 process: 64 tokens of a batch on each
    step 10  loss 3.0265
    step 20  loss 2.0113
    step 30  loss 1.4468
    step 40  loss 1.1109
    step 50  loss 0.9473
    step 60  loss 0.7523
    evaluation  loss 0.7137

("2 processes: 32 tokens of a batch on each".) The model is a tiny Llama made from a configuration; the documents count up by
1, 2 or 3 from a number of their own. On GPUs take away use_cpu, and leave "gloo" out of init_process_group.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    logging,
)

import ringflash as rf
from ringflash.integrations.transformers import RingTraining, register

VOCABULARY = 32
LENGTHS = (24, 17, 8, 15)  # documents of a batch: 64 tokens, and the cuts of 2 processes fall inside documents


# What changes in a script that trains with Trainer. A Trainer whose ranks share sequences is a Trainer with a mixin: all
# ranks of a ring read the same batch, each takes its part, and the loss is divided by the tokens of the whole.
class RingTrainer(RingTraining, Trainer):
    pass


# The name by which models ask for ringflash's attention. A model that does not ask stays as it is.
register()


def documents(count, seed):
    """Sequences that go up by 1, 2 or 3, modulo the vocabulary; by which one a model must find out from their beginning."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
    return [
        {"input_ids": [(start + (n % 3 + 1) * i) % VOCABULARY for i in range(LENGTHS[n % len(LENGTHS)])]}
        for n, start in enumerate(starts)
    ]


def make_model():
    """In real life: AutoModelForCausalLM.from_pretrained(name, attn_implementation="ring")."""
    torch.manual_seed(0)  # the same weights on every process
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="ring",
    )
    return LlamaForCausalLM(config)


def main():
    logging.set_verbosity_error()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    ring = rf.Ring()  # all processes, or this one alone; beside data parallelism Ring(mesh["cp"])

    with tempfile.TemporaryDirectory() as folder:
        trainer = RingTrainer(
            ring=ring,
            model=make_model(),
            # Four documents make a batch. The collator lays them end to end in one row, with position ids that start
            # again at 0: that is how the documents are told apart, and how each is kept from seeing the others.
            data_collator=DataCollatorWithFlattening(),
            train_dataset=documents(48, seed=1),
            eval_dataset=documents(16, seed=2),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=len(LENGTHS),  # of a ring, not of a process
                per_device_eval_batch_size=len(LENGTHS),
                max_steps=60,
                logging_steps=10,
                learning_rate=1e-2,
                ddp_find_unused_parameters=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)  # which prints a dictionary at a time; the same numbers come below
        trainer.train()
        evaluated = trainer.evaluate()

    if ring.rank == 0:
        print(f"{ring.ranks} process{'es' * (ring.ranks > 1)}: {sum(LENGTHS) // ring.ranks} tokens of a batch on each")
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']:2d}  loss {entry['loss']:.4f}")
        print(f"evaluation  loss {evaluated['eval_loss']:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
