"""A script for Lightning's Trainer, which starts its own workers, with two lines for Paceline.

python examples/frameworks/lightning_trainer.py
"""

import paceline

paceline.enable()  # before libraries that use torch's classes are imported

import sys

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_start(self):
        self.print(f"engine: {type(self.trainer.strategy.model).__module__.partition('.')[0]}")

    def on_train_epoch_end(self):
        metrics = {k: round(float(v), 8) for k, v in self.trainer.callback_metrics.items()}
        self.print(f"epoch {self.current_epoch}: {metrics}")


def main() -> None:
    L.seed_everything(0, verbose=False)
    x = torch.randn(256, 8)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=sys.argv[1] if len(sys.argv) > 1 else "ddp",
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=9))


if __name__ == "__main__":
    main()
