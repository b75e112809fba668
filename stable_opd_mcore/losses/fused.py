"""From hidden states and output heads to a loss and its gradients, never holding [N, V]."""

from stable_opd_mcore.losses.head import Head, StopClass, align_head, stop_classes

__all__ = ["Head", "StopClass", "align_head", "stop_classes"]
