nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model /root/data3/Qwen.Qwen2.5-VL-7B-Instruct \
    --train_type lora \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --lora_rank 8 \
    # --target_modules all-linear \
    --dataset data2/train.jsonl \
    --gradient_accumulation_steps 16 \
    --max_length 20480 \
    --deepspeed zero3
