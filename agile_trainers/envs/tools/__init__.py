"""Environments in which the model calls tools."""
