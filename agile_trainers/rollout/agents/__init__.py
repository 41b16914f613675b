"""Plays agents, which are programs that own their loop, through an endpoint that speaks the dialects of chat clients."""
