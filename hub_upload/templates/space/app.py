"""A chat about images that shows how large a model's visual tokens are beside text tokens. Start it: `python app.py`.

settings.json names the model: a repository on the Hub at one revision, or none, for the folder model/ beside this file.
Either is loaded with its own code (`trust_remote_code=True`).
"""

import base64
import html
import io
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gradio as gr
import torch
from gradio.themes.utils.fonts import LocalFont
from PIL import Image, ImageDraw, ImageFont, ImageOps
from transformers import AutoModelForImageTextToText, AutoProcessor, TextIteratorStreamer


HERE = Path(__file__).resolve().parent
SETTINGS = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
MAX_NEW_TOKENS = 128
STRIP_COLUMNS = 32
QUESTIONS = (
    "Which digit is at the top left?",
    "What colour is the digit at the top right?",
    "How many digits are there?",
    "What is in the picture?",
)
# from small to large
HEAT = ((255, 244, 214), (253, 200, 120), (236, 120, 50), (176, 48, 60), (84, 16, 72))


class Refused(Exception):
    """Why a message cannot be answered, in words for its writer."""


# --- the model


def load_model():
    """The model in eval mode, on the GPU where there is one, and its processor."""
    source, options = str(HERE / "model"), {}
    if SETTINGS["repo_id"]:
        source, options = SETTINGS["repo_id"], {"revision": SETTINGS["revision"]}
    gpu = torch.cuda.is_available()
    processor = AutoProcessor.from_pretrained(source, trust_remote_code=True, **options)
    # a CPU is slow in half precision
    dtype = "auto" if gpu else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(source, trust_remote_code=True, dtype=dtype, **options)
    return model.to("cuda" if gpu else "cpu").eval(), processor


def open_image(path: str) -> Image.Image:
    """An image file as RGB: turned as its EXIF data says, transparency laid on white."""
    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            return picture.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise Refused("This file is no image that can be read. Send a PNG or JPEG file.") from error


def model_inputs(model, processor, dialogue: list[dict]):
    """What the model takes for a dialogue that ends with the user's turn, and how many tokens it may answer with.

    Raises:
        Refused: there is no image, no question, or no room for an answer.
    """
    parts = [part for turn in dialogue for part in turn["content"]]
    images = [open_image(part["path"]) for part in parts if part["type"] == "image"]
    if not images:
        raise Refused("Add an image first: press the clip beside your question.")
    if dialogue[-1]["content"][-1]["type"] != "text":
        raise Refused("Write a question about the image.")
    if any(processor.image_token in part.get("text", "") for part in parts):
        raise Refused(f"Leave out the text {processor.image_token}: it stands for an image in this model.")
    prompt = processor.apply_chat_template(dialogue, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[prompt], images=images, return_tensors="pt", add_special_tokens=False)
    length, limit = inputs["input_ids"].shape[1], model.config.text_config.max_position_embeddings
    if length >= limit:
        raise Refused(
            f"The dialogue has {length:,} tokens with its images, and the model takes {limit:,} with its answer. Write "
            f"less, or start a new dialogue."
        )
    return inputs.to(model.device, model.dtype), min(MAX_NEW_TOKENS, limit - length)


def answer_in_pieces(model, processor, inputs, max_new_tokens: int) -> Iterator[str]:
    """The greedy answer so far, each time that a word has come."""
    streamer = TextIteratorStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    failures = []

    def generate():
        try:
            model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
        except Exception as error:
            failures.append(error)
            streamer.end()

    thread = threading.Thread(target=generate)
    thread.start()
    text = ""
    try:
        for piece in streamer:
            text += piece
            yield text.strip()
    finally:
        thread.join()
    if failures:
        raise failures[0]


# --- the norms


@dataclass
class Norms:
    """L2 norms of the tokens of one image, and the mean over the text tokens of the prompt.

    `after` is None for a model without an aligned norm; `shape` is (rows, columns), None where the layout is not known.
    """

    before: list[float]
    after: list[float] | None
    text: float
    shape: tuple[int, int] | None
    picture: Image.Image | None


@contextmanager
def recorded_norms(model) -> Iterator[dict]:
    """While it is open, the first pass through the aligned norm leaves the norms of its `before` and `after`."""
    found = {}

    def keep(module, args, output):
        found.setdefault("before", args[0].detach().float().norm(dim=-1).cpu())
        found.setdefault("after", output.detach().float().norm(dim=-1).cpu())

    hook = model.model.multi_modal_projector.aligned_norm.register_forward_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


@torch.no_grad()
def norms_of(model, processor, inputs, found: dict) -> Norms:
    """The norms of the last image of a prompt and of the prompt's text tokens."""
    pixels = inputs["pixel_values"]
    before, after = (found[key].reshape(len(pixels), -1)[-1].tolist() for key in ("before", "after"))
    ids = inputs["input_ids"][inputs["input_ids"] != processor.image_token_id]
    text = model.get_input_embeddings()(ids).float().norm(dim=-1).mean().item()
    if isinstance(model.model.multi_modal_projector.aligned_norm, torch.nn.Identity):
        after = None
    shape = None
    if patch := getattr(model.config.vision_config, "patch_size", None):
        rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
        shape = (rows, columns) if rows * columns == len(before) else None
    return Norms(before, after, text, shape, seen_picture(pixels[-1], processor.image_processor))


def seen_picture(pixels: torch.Tensor, image_processor) -> Image.Image:
    """The picture as the model sees it, from pixel values of shape (3, height, width)."""
    values = pixels.float().cpu()
    if image_processor.do_normalize:
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (image_processor.image_mean, image_processor.image_std))
        values = values * std + mean
    scaled = (values.clamp(0, 1) * 255).round().byte()
    return Image.fromarray(scaled.permute(1, 2, 0).numpy())


# --- the page


def figure(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def colour(share: float) -> str:
    """The colour at a share (0 to 1) of the heat scale."""
    place = min(max(share, 0.0), 1.0) * (len(HEAT) - 1)
    low = min(int(place), len(HEAT) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(HEAT[low], HEAT[low + 1]))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def heat_map(title: str, norms: list[float], shape: tuple[int, int] | None) -> str:
    """The tokens as a grid of coloured cells; each tells its norm under the mouse. A strip where `shape` is None."""
    mean = sum(norms) / len(norms)
    # tokens that are alike to a tenth shall look alike
    low, high = min(*norms, 0.9 * mean), max(*norms, 1.1 * mean)
    columns = shape[1] if shape else min(STRIP_COLUMNS, len(norms))
    rows = -(-len(norms) // columns)
    cells = []
    for i, norm in enumerate(norms):
        row, column = divmod(i, columns)
        place = f"row {row + 1}, column {column + 1}" if shape else f"token {i + 1}"
        fill = colour((norm - low) / (high - low) if high > low else 0.5)
        cells.append(
            f'<rect x="{column}" y="{row}" width="1" height="1" fill="{fill}"><title>{place}: {norm:.4g}</title></rect>'
        )
    scale = ", ".join(colour(i / 8) for i in range(9))
    kind = "grid" if shape else "strip"
    return (
        f'<figure class="{kind}"><figcaption>{title}</figcaption>'
        f'<svg viewBox="0 0 {columns} {rows}" role="img" aria-label="{title}: norms of {len(norms)} tokens">'
        f"{''.join(cells)}</svg>"
        f'<div class="scale"><span>{figure(low)}</span><i style="background:linear-gradient(90deg, {scale})"></i>'
        f"<span>{figure(high)}</span></div></figure>"
    )


def seen_map(norms: Norms) -> str:
    """The picture as the model sees it, with the lines between the tokens where their layout is known."""
    file = io.BytesIO()
    norms.picture.save(file, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    rows, columns = norms.shape or norms.picture.size[::-1]
    lines = ""
    if norms.shape:
        lines = "".join([f"M{x} 0V{rows}" for x in range(1, columns)] + [f"M0 {y}H{columns}" for y in range(1, rows)])
    return (
        f"<figure><figcaption>what the model sees</figcaption>"
        f'<svg viewBox="0 0 {columns} {rows}" role="img" aria-label="the image">'
        f'<image href="{address}" width="{columns}" height="{rows}" preserveAspectRatio="none"/>'
        f'<path d="{lines}"/></svg><div class="scale">{len(norms.before):,} visual tokens</div></figure>'
    )


def norms_page(norms: Norms, images: int, answers: int) -> str:
    """HTML of the norms of one image: their means in words and as bars, and maps of its tokens before and after."""
    before, after = sum(norms.before) / len(norms.before), None
    bars = [("before", "visual tokens, out of the projector", before)]
    maps = [seen_map(norms), heat_map("out of the projector", norms.before, norms.shape)]
    sentence = f"A visual token of this image is <b>{figure(before / norms.text)} times</b> as large as a text token"
    if norms.after is None:
        sentence += " where both enter the language model: this model has no aligned norm."
    else:
        after = sum(norms.after) / len(norms.after)
        bars.append(("after", "visual tokens, after the aligned norm", after))
        maps.append(heat_map("after the aligned norm", norms.after, norms.shape))
        sentence += (
            f" as the projector gives it out, and <b>{figure(after / norms.text)} times</b> after the aligned norm, "
            f"where it enters the language model."
        )
    bars.append(("text", "text tokens of the prompt", norms.text))
    largest = max(value for *_, value in bars)
    drawn = "".join(
        f'<div class="bar {key}"><span>{label}</span><b>{figure(value)}</b>'
        f'<i style="width:{100 * value / largest:.1f}%"></i></div>'
        for key, label, value in bars
    )
    which = " of the last image" if images > 1 else ""
    note = (
        "" if norms.shape else "<p>How these tokens lie in the image is not known: they are shown in their order.</p>"
    )
    return (
        f'<div class="norms" data-answers="{answers}"><p class="sentence">{sentence}</p><h3>Mean L2 norm</h3>{drawn}'
        f'<h3>Token by token{which}</h3><div class="maps">{"".join(maps)}</div>{note}</div>'
    )


def page_without_norms(model) -> str:
    """What stands in the place of the norms before the first answer."""
    has_norm = not isinstance(model.model.multi_modal_projector.aligned_norm, torch.nn.Identity)
    after = ", and again after the aligned norm, where they enter the language model" if has_norm else ""
    return (
        f'<div class="norms"><p class="sentence">Ask about an image, and the L2 norm of each of its visual tokens appears '
        f"here: as the projector gives them out{after}, beside the norm of text tokens.</p></div>"
    )


def example_picture() -> Image.Image:
    """Three digits in three quarters of a dark square."""
    picture = Image.new("RGB", (256, 256), (18, 20, 30))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(110)
    for digit, place, tint in (("7", (64, 64), "#ff4040"), ("3", (192, 64), "#50dc50"), ("5", (64, 192), "#fade3c")):
        draw.text(place, digit, fill=tint, font=font, anchor="mm", stroke_width=2)
    return picture


CSS = """
.gradio-container {max-width: 1240px !important; margin: 0 auto}
#chat .message img {max-height: 150px; width: auto}
#norms, #norms > * {padding: 0}
#title h1 {margin: 0; font-weight: 600}
#title p {margin: 0; opacity: .75}
.norms {border: 1px solid var(--border-color-primary); border-radius: var(--block-radius);
  background: var(--block-background-fill); padding: 18px 20px 20px; color: var(--body-text-color)}
.norms .sentence {font-size: 1.1rem; line-height: 1.5; margin: 0}
.norms b {font-weight: 600; color: inherit}
.norms h3 {font-size: .95rem; font-weight: 600; margin: 20px 0 8px}
.norms .bar {display: grid; grid-template-columns: 1fr auto; font-size: .9rem; margin-bottom: 9px}
.norms .bar i {grid-column: 1 / -1; height: 12px; min-width: 3px; margin-top: 2px; border-radius: 3px; background: #3f86c6}
.norms .before i {background: #d8622a}
.norms .after i {background: #f0a04b}
.norms .maps {display: grid; grid-template-columns: repeat(3, 1fr); gap: 14px}
.norms figure {margin: 0; min-width: 0}
.norms figure.strip {grid-column: 1 / -1}
.norms figcaption {font-size: .82rem; line-height: 1.25; opacity: .8; margin-bottom: 4px; display: flex; align-items: end}
.norms svg {width: 100%; display: block; border-radius: 4px}
.norms svg path {stroke: #fff; stroke-opacity: .3; vector-effect: non-scaling-stroke; fill: none}
.norms rect:hover {stroke: #fff; stroke-width: 2px; vector-effect: non-scaling-stroke}
.norms .scale {display: flex; align-items: center; gap: 6px; font-size: .78rem; margin-top: 6px; white-space: nowrap}
.norms .scale i {flex: 1; height: 7px; border-radius: 3px}
@media (max-width: 640px) {
  #chat {height: 420px !important}
  .norms {padding: 14px}
  .norms .maps {gap: 8px}
  .norms figcaption {min-height: 2.5em}
  .norms .scale i {display: none}
  .norms .scale i + span::before {content: "to "}
}
"""


def shown(dialogue: list[dict]) -> list[dict]:
    """A dialogue in the form of gr.Chatbot."""
    return [
        {"role": turn["role"], "content": {"path": part["path"]} if part["type"] == "image" else part["text"]}
        for turn in dialogue
        for part in turn["content"]
    ]


def build(model, processor) -> gr.Blocks:
    """The app: the chat to the left, the norms to the right, below each other on a phone."""
    one_at_a_time = threading.Lock()

    def ask(message: dict, dialogue: list[dict]):
        content = [{"type": "image", "path": path} for path in message["files"]]
        if question := message["text"].strip():
            content.append({"type": "text", "text": question})
        asked = [*dialogue, {"role": "user", "content": content}]
        try:
            inputs, room = model_inputs(model, processor, asked)
        except Refused as refused:
            gr.Warning(html.escape(str(refused)))
            yield {box: gr.skip()}
            return
        yield {box: None, chat: shown(asked)}
        text = ""
        with one_at_a_time, recorded_norms(model) as found:
            for text in answer_in_pieces(model, processor, inputs, room):
                yield {chat: [*shown(asked), {"role": "assistant", "content": text}]}
            norms = norms_of(model, processor, inputs, found)
        asked.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        page = norms_page(norms, images=len(inputs["pixel_values"]), answers=len(asked) // 2)
        yield {chat: shown(asked), state: asked, panel: page}

    picture = str(Path(tempfile.mkdtemp(prefix="space-example-")) / "digits.png")
    example_picture().save(picture)
    examples = [{"text": question, "files": [picture]} for question in QUESTIONS]
    nothing = page_without_norms(model)
    with gr.Blocks(title=SETTINGS["title"], analytics_enabled=False, delete_cache=(3600, 86400)) as app:
        state = gr.State([])
        gr.Markdown(f"# {SETTINGS['title']}\nAsk about an image, and see how large its tokens are.", elem_id="title")
        with gr.Row():
            with gr.Column(min_width=320):
                chat = gr.Chatbot(
                    height=540,
                    show_label=False,
                    buttons=["copy"],
                    examples=examples,
                    placeholder="Add an image and ask about it, or try one of these.",
                    elem_id="chat",
                )
                box = gr.MultimodalTextbox(
                    file_types=["image"],
                    file_count="multiple",
                    sources=["upload"],
                    placeholder="Add an image and ask about it",
                    show_label=False,
                    elem_id="question",
                )
                anew = gr.Button("New dialogue", size="sm")
            with gr.Column(min_width=320):
                panel = gr.HTML(nothing, elem_id="norms")
        shown_to, outputs = [box, state], [box, chat, state, panel]
        box.submit(ask, shown_to, outputs, show_progress_on=chat)
        chat.example_select(example_chosen, None, box).then(ask, shown_to, outputs, show_progress_on=chat)
        gr.on([anew.click, chat.clear], lambda: (None, [], [], nothing), None, outputs)
    return app


def example_chosen(event: gr.SelectData) -> dict:
    """The question and image of an example of the chat."""
    return {"text": event.value["text"], "files": [file["path"] for file in event.value["files"]]}


if __name__ == "__main__":
    # gradio's own semibold file lacks most letters
    font = [LocalFont("Source Sans Pro", weights=(400, 700)), "ui-sans-serif", "system-ui", "sans-serif"]
    build(*load_model()).launch(
        theme=gr.themes.Default(font=font), css=CSS, show_error=True, ssr_mode=False, footer_links=["gradio"]
    )
