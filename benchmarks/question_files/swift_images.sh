NNODES=$WORLD_SIZE \
NPROC_PER_NODE=8 \
swift sft \
    --model /data/ckpt/Qwen2-VL-7B-Instruct/ \
    --train_type full \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
    --dataset train.jsonl \
    --freeze_vit true \
    --deepspeed zero2
