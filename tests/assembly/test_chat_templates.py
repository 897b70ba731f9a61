"""The chat template of a composed model: what it renders, what it marks as the answer, and where it is kept."""

import pytest
import transformers
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer


needs_masks_of_processors = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="processors give assistant masks since transformers 5.18"
)

IMAGE = Image.new("RGB", (50, 40), "red")
CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A house."}]},
    {"role": "user", "content": "Red?"},
    {"role": "assistant", "content": "It is red."},
]
ANSWERS = ["A house.", "It is red."]
RENDERED = {
    "smollm2": (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n<image>\nWhat is it?<|im_end|>\n"
        "<|im_start|>assistant\nA house.<|im_end|>\n<|im_start|>user\nRed?<|im_end|>\n"
        "<|im_start|>assistant\nIt is red.<|im_end|>\n"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat is it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA house.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nRed?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nIt is red.<|eot_id|>"
    ),
    "gemma": (
        "<bos><start_of_turn>user\nBe short.\n\n<image>\nWhat is it?<end_of_turn>\n"
        "<start_of_turn>model\nA house.<end_of_turn>\n<start_of_turn>user\nRed?<end_of_turn>\n"
        "<start_of_turn>model\nIt is red.<end_of_turn>\n"
    ),
    "plain": ("<s>Be short. USER: <image>\nWhat is it? ASSISTANT: A house.</s>USER: Red? ASSISTANT: It is red.</s>"),
}
END = {"smollm2": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "plain": "</s>"}
OPENING = {
    "smollm2": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>model\n",
    "plain": "ASSISTANT:",
}


@pytest.mark.both_generations
@pytest.mark.parametrize("text", RENDERED)
def test_each_family_renders_its_own_turns(composed, text):
    _, processor = composed(text=text)
    assert processor.apply_chat_template(CONVERSATION) == RENDERED[text]


@pytest.mark.parametrize("text", RENDERED)
def test_generation_prompt_is_what_training_puts_before_an_answer(composed, text):
    _, processor = composed(text=text)
    prompt = processor.apply_chat_template(CONVERSATION[:2], add_generation_prompt=True)
    assert prompt.endswith(OPENING[text])
    assert processor.apply_chat_template(CONVERSATION[:3]).startswith(prompt)


@pytest.mark.parametrize("text", RENDERED)
def test_several_images_strings_and_part_forms_render_alike(composed, text):
    _, processor = composed(text=text)

    def render(content):
        return processor.apply_chat_template([{"role": "user", "content": content}])

    words = {"type": "text", "text": "Which is larger?"}
    two = render([{"type": "image"}, {"type": "image"}, words])
    assert two == render([{"type": "image", "image": IMAGE}, {"type": "image", "image": IMAGE}, words])
    assert two == render("<image>\n<image>\nWhich is larger?")
    assert render("Which is larger?") == render([words]) == render([{"type": "text", "content": "Which is larger?"}])
    assert render([words, {"type": "image"}]).count("Which is larger?<image>\n") == 1


def test_no_system_turn_is_made_up(composed):
    _, processor = composed(text="qwen2")
    assert processor.apply_chat_template(CONVERSATION[1:2]) == "<|im_start|>user\n<image>\nWhat is it?<|im_end|>\n"


def test_part_of_another_kind_is_refused_by_name(composed):
    _, processor = composed()
    with pytest.raises(Exception, match="text and images, not parts of type video"):
        processor.apply_chat_template([{"role": "user", "content": [{"type": "video"}]}])


@needs_masks_of_processors
@pytest.mark.parametrize("text", RENDERED)
def test_mask_holds_exactly_the_answers_and_their_end_of_turn_at_expanded_offsets(composed, text):
    _, processor = composed(text=text)
    encoded = processor.apply_chat_template(
        CONVERSATION, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"][0], encoded["assistant_masks"][0]
    assert ids.count(processor.image_token_id) == 16 and len(mask) == len(ids)
    runs, before = [], 0
    for token, marked in zip(ids, mask):
        if marked and not before:
            runs.append([])
        if marked:
            runs[-1].append(token)
        before = marked
    lead = " " if text == "plain" else ""
    assert [processor.tokenizer.decode(run) for run in runs] == [f"{lead}{answer}{END[text]}" for answer in ANSWERS]


@pytest.mark.parametrize("text", RENDERED)
def test_tokenizers_own_mask_holds_the_answers(composed, text):
    _, processor = composed(text=text)
    encoded = processor.tokenizer.apply_chat_template(
        CONVERSATION, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [token for token, kept in zip(encoded["input_ids"], encoded["assistant_masks"]) if kept]
    assert processor.tokenizer.decode(marked).replace(" ", "") == "".join(
        f"{answer}{END[text]}" for answer in ANSWERS
    ).replace(" ", "")


@pytest.mark.both_generations
@pytest.mark.parametrize("text", ["smollm2", "llama3"])
def test_processor_and_tokenizer_reload_with_the_same_template(composed, saved, text):
    _, processor = composed(text=text)
    reloaded = AutoProcessor.from_pretrained(saved(text=text), trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(saved(text=text), trust_remote_code=True)
    plain = [{"role": "user", "content": "Red?"}]
    prompts = {
        holder.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        for holder in (processor, processor.tokenizer, reloaded, reloaded.tokenizer, tokenizer)
    }
    assert len(prompts) == 1
    assert reloaded.apply_chat_template(CONVERSATION) == RENDERED[text]


@pytest.mark.parametrize("text", RENDERED)
def test_bos_token_comes_once_in_both_ways_of_encoding(composed, text):
    _, processor = composed(text=text)
    ids = processor.apply_chat_template(CONVERSATION[1:2], tokenize=True, return_dict=True)["input_ids"][0]
    same = processor.tokenizer.apply_chat_template(CONVERSATION[3:4], tokenize=True, return_dict=True)["input_ids"]
    bos = processor.tokenizer.bos_token_id
    first = 0 if text == "smollm2" else 1
    if first:
        assert ids.count(bos) == same.count(bos) == 1 and ids[0] == same[0] == bos
    else:
        assert processor.tokenizer.decode(ids[:1]) == processor.tokenizer.decode(same[:1]) == "<|im_start|>"
