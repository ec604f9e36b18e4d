"""Passes over the forward graph: each recognises a part of it and replaces the part by one operator."""
