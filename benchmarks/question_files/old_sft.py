import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer

model_name = "mistralai/Mistral-7B-v0.1"
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
)
model = AutoModelForCausalLM.from_pretrained(
    model_name, quantization_config=bnb_config, device_map={"": 0}
)
tokenizer = AutoTokenizer.from_pretrained(model_name)
arguments = TrainingArguments(
    output_dir="results",
    per_device_train_batch_size=4,
    optim="paged_adamw_32bit",
    learning_rate=2e-4,
    fp16=False,
    warmup_ratio=0.03,
    group_by_length=True,
)
trainer = SFTTrainer(
    model=model,
    train_dataset=load_dataset("mlabonne/guanaco-llama2-1k", split="train"),
    peft_config=LoraConfig(lora_alpha=16, lora_dropout=0.1, r=64, task_type="CAUSAL_LM"),
    dataset_text_field="text",
    max_seq_length=512,
    tokenizer=tokenizer,
    args=arguments,
)
trainer.train()
