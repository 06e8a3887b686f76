"""A script for the Trainer of Hugging Face transformers, with two lines for Paceline.

paceline run --workers 2 examples/frameworks/hf_trainer.py
"""

import paceline

paceline.enable()  # before libraries that use torch's classes are imported

import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Sentences(Dataset):
    """Random sentences, labelled 1 if their first word comes before their second."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, 20, (size, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "labels": (words[0] < words[1]).long()}


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 8}
    config = BertConfig(vocab_size=20, num_hidden_layers=1, num_attention_heads=2, **sizes)
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/hf_trainer",
            use_cpu=not torch.cuda.is_available(),  # without it, every worker would train alone
            num_train_epochs=3,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Sentences(256, seed=1),
        eval_dataset=Sentences(50, seed=2),
        compute_metrics=accuracy,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"engine: {type(trainer.model_wrapped).__module__.partition('.')[0]}")
        for entry in trainer.state.log_history:
            kept = {k: v for k, v in entry.items() if "loss" in k or "accuracy" in k}
            print(f"epoch {entry['epoch']:.0f}: {kept}")


if __name__ == "__main__":
    main()
