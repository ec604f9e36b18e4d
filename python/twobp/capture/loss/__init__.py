"""The mean over targets becomes a sum, and programs count the targets."""
