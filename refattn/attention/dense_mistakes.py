"""The ways people get softmax attention wrong, each as the numbers that the mistake gives."""

from refattn.records import Mutation

__all__ = ["dense_mutations"]

dense_mutations: tuple[Mutation, ...] = ()
