"""The options of a model's loss: those of the caller, and how the model changes its logits."""

from __future__ import annotations

from dataclasses import replace

from evenpipe.model import Description
from evenpipe.vocabulary import LossOptions
from evenpipe.words import refused

PLAIN = LossOptions()


def loss_of_model(options: LossOptions, description: Description) -> LossOptions:
    """The caller's options together with the model's own changes to its logits. Raises InputError if they disagree."""
    if options.ignore_index != PLAIN.ignore_index:
        raise refused("loss: ignore_index", options.ignore_index, f"{PLAIN.ignore_index}, as in transformers")
    if description.config is None:  # plain modules: the caller decides
        return options
    for name in ("soft_cap", "logit_scale"):
        if getattr(options, name) != getattr(PLAIN, name):
            raise refused(
                f"loss: {name}",
                getattr(options, name),
                f"{getattr(PLAIN, name)}: how {description.architecture} changes its logits follows from the model",
            )
    return replace(options, logit_scale=description.logit_scale, soft_cap=description.soft_cap)
