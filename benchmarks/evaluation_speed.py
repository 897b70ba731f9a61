"""Throughput of `normalign evaluate`'s own loop against calling processor and model directly on the same batches.

    OMP_NUM_THREADS=1 python benchmarks/evaluation_speed.py [--rows 192] [--seconds 100] [--device cpu] [--out PATH]

The model is composed of the two mini backbones; the questions are digit scenes on disk, as `--data FILE.jsonl` takes them.
The evaluation is timed whole, from a model that is loaded to results.json: telling the model from others, asking, keeping
each batch's answers on disk (fsync), scoring them, and writing them once more with question and score. What it stands
against opens the same images, in the same batches and order and with the same padding, calls processor, generate and
batch_decode, and keeps nothing. Six cases:

- questions as `--data` asks them, with at most 64 new tokens;
- answers of at most 4 tokens, a letter or a word as most benchmarks ask for: what is done around the model weighs more;
- the same with pictures as large as photographs, JPEG of 640 x 480: opening them takes as long as the model does;
- the same with small ones and one row a batch, so that every sample's answer is written by itself;
- log-likelihoods of given answers, against a forward pass, log_softmax and gather;
- small pictures and answers of at most 4 tokens of a language model of SmolLM2-135M's shape with random weights: what a
  model takes that is a hundred times as large, and still a small one.

The two take turns in one process, on one thread, by the clock, since waiting for the disk counts; each case has as many
turns as go into --seconds, and seven at least. That both give the same
answers is checked. The ratio is that of throughputs, so that below 1 ours is the slower: the median over the turns of the
direct call's seconds to ours in the same turn, which a machine that is busy at times disturbs least; its quartiles are
given beside it.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from record import write_result
from transformers import LlamaConfig, LlamaForCausalLM

from normalign import compose
from normalign.evaluation.evaluating import ModelAnswerer, evaluate_tasks
from normalign.evaluation.generation import chat_prompts
from normalign.evaluation.loglikelihood import log_likelihoods
from normalign.evaluation.own_data import OwnTask
from normalign.train_trl.digit_scenes import digit_scene_rows


def write_questions(rows: int, folder: Path, *, photographs: bool = False) -> Path:
    """Digit scenes, each with its image, as a file of questions in a new folder."""
    folder.mkdir()
    ending = "jpg" if photographs else "png"
    lines = []
    for number, row in enumerate(digit_scene_rows(rows, split="test", text_only_share=0.0)):
        image = row["images"][0].resize((640, 480)) if photographs else row["images"][0]
        image.save(folder / f"{number}.{ending}")
        question = row["messages"][0]["content"][-1]["text"]
        lines.append(
            {"id": f"{number:05}", "image": f"{number}.{ending}", "question": question, "answer": row["answer"]}
        )
    file = folder / "scenes.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def write_language_model(folder: Path) -> Path:
    """A language model of SmolLM2-135M's shape with random weights, and the mini backbone's tokenizer."""
    _, processor = compose("mini-vision", "mini-language", seed=0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return folder


def batches(file: Path, batch_size: int) -> list[list[dict]]:
    """The file's rows in the order in which the evaluation asks them: the longest question first."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: (-len(row["question"]), row["id"]))
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def conversation(row: dict) -> list[dict]:
    """The row's question behind its image, for the chat template."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]}]


def evaluated(model, processor, file: Path, batch_size: int, max_new_tokens: int) -> Path:
    """The file of answers of a whole evaluation, in a new folder beside the questions."""
    task = OwnTask(file)
    task.max_new_tokens = max_new_tokens
    out = Path(tempfile.mkdtemp(dir=file.parent))
    evaluate_tasks(ModelAnswerer(model, processor), [task], out, model="mini", batch_size=batch_size)
    return out / "samples" / f"{task.name}.jsonl"


def read_answers(result: Path | dict) -> dict:
    """What a way gave by row id, out of the file if it wrote one."""
    if isinstance(result, dict):
        return result
    lines = result.read_text(encoding="utf-8").split("\n")
    return {row["id"]: row["answer"] for row in map(json.loads, filter(None, lines))}


def generated_directly(model, processor, file: Path, batch_size: int, max_new_tokens: int) -> dict[str, str]:
    """The same answers by processor, generate and batch_decode alone."""
    answers = {}
    for batch in batches(file, batch_size):
        images = [Image.open(file.parent / row["image"]).convert("RGB") for row in batch]
        texts = [
            processor.apply_chat_template(conversation(row), add_generation_prompt=True, tokenize=False)
            for row in batch
        ]
        inputs = processor(
            text=texts,
            images=images,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        ).to(model.device)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)
        texts = processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.update((row["id"], text.strip()) for row, text in zip(batch, texts, strict=True))
    return answers


def scored(model, processor, file: Path, batch_size: int) -> dict[str, float]:
    """By row id, the log-likelihood of the right answer, by our function."""
    rows = [row for batch in batches(file, batch_size) for row in batch]
    found = log_likelihoods(
        model,
        processor,
        chat_prompts(processor, [conversation(row) for row in rows]),
        [[Image.open(file.parent / row["image"]).convert("RGB")] for row in rows],
        [row["answer"] for row in rows],
        batch_size=batch_size,
    )
    return {row["id"]: value for row, (value, _) in zip(rows, found, strict=True)}


def scored_directly(model, processor, file: Path, batch_size: int) -> dict[str, float]:
    """The same by a forward pass, log_softmax and gather; longest row first, as ours does."""
    rows = [row for batch in batches(file, batch_size) for row in batch]
    prompts = [
        processor.apply_chat_template(conversation(row), add_generation_prompt=True, tokenize=False) for row in rows
    ]
    texts = [prompt + row["answer"] for prompt, row in zip(prompts, rows, strict=True)]
    lengths = [
        [len(ids) for ids in processor.tokenizer(some, add_special_tokens=False)["input_ids"]]
        for some in (prompts, texts)
    ]
    order = sorted(range(len(rows)), key=lambda i: -lengths[1][i])
    values = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        inputs = processor(
            text=[texts[i] for i in batch],
            images=[Image.open(file.parent / rows[i]["image"]).convert("RGB") for i in batch],
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        ).to(model.device)
        with torch.inference_mode():
            logits = model(**inputs, use_cache=False).logits[:, :-1].float().log_softmax(dim=-1)
            each = logits.gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
            for i, row, end in zip(batch, each, inputs["attention_mask"].sum(dim=1).tolist(), strict=True):
                count = lengths[1][i] - lengths[0][i]
                values[rows[i]["id"]] = row[end - 1 - count : end - 1].double().sum().item()
    return values


def refuse_difference(case: str, ours: dict, direct: dict) -> int:
    """How many rows there are; ends the program if the two ways do not give the same, since the work was not the same."""
    apart = [row for row in direct if ours.get(row) != direct[row] and not _close(ours.get(row), direct[row])]
    if apart or set(ours) != set(direct):
        raise SystemExit(f"{case}: {len(apart)} of {len(direct)} rows differ between evaluation and direct call.")
    return len(direct)


def _close(one, two) -> bool:
    return isinstance(one, float) and isinstance(two, float) and abs(one - two) <= 1e-3


def timed(run: Callable[..., Path | dict], *arguments) -> tuple[float, Path | dict]:
    """Seconds from call to result, and the result."""
    start = time.perf_counter()
    result = run(*arguments)
    return time.perf_counter() - start, result


def main() -> None:
    """Measures the cases and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=100.0, help="how long each case is measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "evaluation_speed.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mini = compose("mini-vision", "mini-language", seed=0, dtype=torch.float32)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        larger = compose("mini-vision", write_language_model(Path(folder) / "language"), seed=0, dtype=torch.float32)
        file = write_questions(args.rows, Path(folder) / "scenes")
        large = write_questions(args.rows, Path(folder) / "photographs", photographs=True)
        few = write_questions(max(1, args.rows // 4), Path(folder) / "few")
        size = args.batch_size
        cases = [
            ("generation, up to 64 tokens", mini, evaluated, generated_directly, (file, size, 64)),
            ("generation, up to 4 tokens", mini, evaluated, generated_directly, (file, size, 4)),
            ("generation, photographs", mini, evaluated, generated_directly, (large, size, 4)),
            ("generation, one row a batch", mini, evaluated, generated_directly, (few, 1, 4)),
            ("log-likelihoods", mini, scored, scored_directly, (file, size)),
            ("generation, larger model", larger, evaluated, generated_directly, (few, size, 4)),
        ]
        for name, (model, processor), ours, direct, settings in cases:
            model = model.to(args.device).eval()
            ways = {"direct": direct, "evaluation": ours}
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            began = None
            while began is None or time.monotonic() - began < args.seconds or len(seconds["direct"]) < 7:
                results = {}
                # who begins changes, so that a machine that slows down or speeds up favours neither
                for way in list(ways) if len(seconds["direct"]) % 2 else reversed(ways):
                    took, results[way] = timed(ways[way], model, processor, *settings)
                    if began is not None:
                        seconds[way].append(took)
                began = began or time.monotonic()  # the first turn warms up
                count = refuse_difference(name, read_answers(results["evaluation"]), results["direct"])
            median = {way: statistics.median(values) for way, values in seconds.items()}
            for way in ways:
                quarter, ratio, three_quarters = statistics.quantiles(
                    [direct / own for direct, own in zip(seconds["direct"], seconds[way], strict=True)], n=4
                )
                rows.append(
                    {
                        "case": f"{name}, {way}",
                        "seconds_median": median[way],
                        "ratio": ratio,
                        "ratio_quartiles": [quarter, three_quarters],
                        "rows_per_second": count / median[way],
                        "batch_size": settings[1],
                        "rows": count,
                        "turns": len(seconds[way]),
                    }
                )
                print(
                    f"{rows[-1]['case']:<42} {median[way]:7.3f} s  {rows[-1]['rows_per_second']:7.1f} rows/s  "
                    f"{ratio:.3f}x ({quarter:.3f} to {three_quarters:.3f})"
                )
    write_result(args.out, rows, device=args.device)


if __name__ == "__main__":
    main()
