"""Let a published model, or a run's model folder, continue a text. Needs torch and transformers, nothing of ours.

python examples/use_from_hub.py runs/tiny/model "The expression"
"""

import re
import sys
from pathlib import Path

from transformers import pipeline

if len(sys.argv) < 2:
    sys.exit("usage: python examples/use_from_hub.py MODEL_FOLDER_OR_HUB_ID [PROMPT]")
model, prompt = sys.argv[1], " ".join(sys.argv[2:]) or "The"
if not (Path(model) / "config.json").is_file() and not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
    sys.exit(f"{model} is neither a folder with a model in it nor a Hub id like user/name.")

# trust_remote_code: the model's own Python files, three short ones beside its weights, are run on your machine.
write = pipeline("text-generation", model=model, trust_remote_code=True)
print(write(prompt)[0]["generated_text"])
