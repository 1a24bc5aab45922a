"""How the fine-tuned model is served."""
