"""The settings that `train --help` and `plan --help` print; `--help_all` prints the others too."""

COMMON_SETTINGS = {  # what `train --help` prints; argparse adds the defaults
    "data": {
        "text": "Text files, folders or globs.",
        "dataset": "Hub id of a data set, instead of --text.",
        "data_dir": "Folder written by the command `prepare`.",
        "chat_data": "Chats to fine-tune on (with --init_from).",
        "tokenizer": "Hub id or folder. Unset: one is trained.",
    },
    "model": {
        "init_from": "Model to fine-tune. Unset: initial weights.",
        "num_hidden_layers": "Number of layers.",
        "hidden_size": "Width of the model.",
        "num_attention_heads": "Attention heads of a layer.",
        "max_position_embeddings": "Context length in tokens.",
    },
    "schedule and optimizer": {
        "max_steps": "Optimizer steps. -1: --num_train_epochs.",
        "num_train_epochs": "Passes over the training rows.",
        "learning_rate": "Peak learning rate.",
        "lr_scheduler_type": "Shape of the learning rate.",
        "warmup_steps": "Steps of warm-up; below 1, their share.",
        "weight_decay": "Decay of matrices and embeddings.",
    },
    "batch": {
        "per_device_train_batch_size": "Rows of a micro-batch.",
        "gradient_accumulation_steps": "Micro-batches of a step.",
        "bf16": "Compute in bfloat16 (on a GPU).",
    },
    "evaluation and saving": {
        "eval_strategy": "When to measure the held-out loss.",
        "eval_steps": "Steps between two evaluations.",
        "save_steps": "Steps between two checkpoints.",
    },
    "run": {
        "output_dir": "Run folder. Unset: runs/<name of the recipe>.",
        "overwrite": "Replace the run in this folder.",
        "seed": "Seed of initial weights and dropout.",
    },
}
