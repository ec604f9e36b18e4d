"""Classification of pictures, which the collator stacks."""
import numpy
import torch
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification
from transformers import Trainer

import small

SIDE, PATCH = 4 * small.LENGTH, 8
rng = numpy.random.default_rng(0)
pictures = [{"picture": (rng.random((3, SIDE, SIDE)) + i % 4).astype("float32"), "class": i % 4} for i in range(80)]
model = small.seeded(lambda: ViTForImageClassification(ViTConfig(
    hidden_size=small.WIDTH, intermediate_size=4 * small.WIDTH, num_hidden_layers=small.LAYERS, num_attention_heads=2, image_size=SIDE, patch_size=PATCH,
    hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=4)))


def stacked(samples):
    return {"pixel_values": torch.stack([torch.from_numpy(one["picture"]) for one in samples]), "labels": torch.tensor([one["class"] for one in samples])}


def accuracy(result):
    return {"accuracy": float(numpy.mean(result.predictions.argmax(-1) == result.label_ids))}


trainer = Trainer(
    model=model, args=TrainingArguments("output", remove_unused_columns=False, **small.COMMON), train_dataset=pictures[:72], eval_dataset=pictures[72:],
    data_collator=stacked, compute_metrics=accuracy)
trainer.train()
trainer.evaluate()
