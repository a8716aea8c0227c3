"""Rewards that are programs."""
