"""Models that a run reads: config.json, and the names, shapes and types of their weights."""

from __future__ import annotations

from stable_opd_mcore.checks.known import Known


def student_settings(known: Known) -> None:
    """A config.json that `train` refuses."""
    _ = known.architecture


def teacher_settings(known: Known) -> None:
    """A config.json that `train` refuses."""
    _ = known.teacher_architecture


def weights(known: Known) -> None:
    """Files that `train` refuses when it loads a model; no value is read."""
    config, models = known.config, known.models.values()
    places = [(settings.path, model) for settings, model in models]
    if config.largest_beta:
        places.append((config.reference.path, known.architecture))
    read = [(path, built) for path, built in places if path is not None]
    if read:
        # imports Megatron, which takes seconds
        from stable_opd_mcore.models.huggingface import check_hf
        from stable_opd_mcore.models.megatron_checkpoint import is_megatron

        for path, architecture in read:
            if not is_megatron(path):
                check_hf(path, architecture)
