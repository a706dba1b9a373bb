"""What `Pipeline` accepts and returns, beside the plain training step: compared with transformers in one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import reference
import torch
import torch.distributed as dist
from families import tiny_config, whole_model
from harness import run_processes
from test_gradients import MODES, Case, check, described
from torch.nn import functional

from evenpipe import LossOptions, Pipeline
from evenpipe.errors import InputError
from evenpipe.model import describe
from evenpipe.schedule import Kind, Order, Pass, Placement, add_vocabulary, generate

FP64 = torch.float64


def make(mode: str, *, tied: bool = False, vocabulary: int = 97, microbatches: int = 2, **options) -> Pipeline:
    return Pipeline(
        described(vocabulary, tied, FP64),
        vocabulary=mode,
        microbatches=microbatches,
        parameter_dtype=FP64,
        self_check=False,
        **options,
    )


def whole(tied: bool = False, vocabulary: int = 97):
    return copy.deepcopy(described(vocabulary, tied, FP64).model)


def logits_of(model, ids, **keywords):
    return model(input_ids=ids, use_cache=False, **keywords).logits[:, :-1].flatten(0, 1)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(pipeline: Pipeline, model, tolerance: float = 1e-10) -> None:
    found = pipeline.full_gradients()
    if pipeline.device == 0:
        error, name = reference.worst(found, gradients(model))
        assert error < tolerance, f"{name}: {error:.1e}"


# --- vocabularies that leave a device without rows, other schedules, other types -------------------------


def test_a_shard_may_be_empty(sample) -> None:
    cases = [Case(3, mode, 9, tied) for mode in MODES for tied in (False, True)]
    check(4, sample(cases, 3), FP64, tolerance=1e-10, weight_tolerance=1e-8)


def test_modes_of_other_schedules(sample) -> None:
    """Beside the modes of tests/multiprocess/test_schedules.py."""
    names = ("gpipe", "interleaved", "looped-bfs")
    cases = [Case(*values) for values in itertools.product((3, 4), MODES, (97,), (False, True), names)]
    check(2, sample(cases, 6), FP64, tolerance=1e-10, weight_tolerance=1e-8)


def in_fp32(cases: list[Case]) -> list[str]:
    """fp32 in every layout against transformers in one process: gradients to 1e-5, and the weights after three steps.

    The yardstick for the weights is the difference between transformers on the whole batch and on microbatches, times
    three. It measures the order of sums only. Where AdamW blows up a nearly vanishing gradient, the rounding that both
    runs of transformers share (its log-softmax is off by up to 7 units in the last place here) decides instead; there
    our weights must be as close to those of fp64 as transformers' are, times 1.5.
    """
    from test_gradients import expected, run_case

    faults = []
    for case in cases:
        data, wanted = expected(case.vocabulary, case.tied, torch.float32, 2 * case.microbatches)
        found = run_case(case, torch.float32)
        if wanted is None:
            continue
        if not (found.loss_error <= 1e-5 and found.gradient_error <= 1e-5):
            faults.append(f"{case}: loss {found.loss_error:.1e}, gradient {found.gradient_error:.1e} ({found.worst})")
        apart, exact = in_microbatches(case, data), in_fp64(case, data)
        for name, weight in wanted.weights.items():
            ours, order = distance(found.weights[name], weight), distance(apart[name], weight)
            from_exact, theirs = distance(found.weights[name], exact[name]), distance(weight, exact[name])
            if ours > 3 * order and from_exact > 1.5 * theirs:
                faults.append(f"{case}, {name}: {ours:.1e} > 3 x {order:.1e} and {from_exact:.1e} > 1.5 x {theirs:.1e}")
    return faults


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(one.double() - other.double()) / torch.linalg.vector_norm(other.double()))


def in_fp64(case: Case, data) -> dict[str, torch.Tensor]:
    """What transformers gives from the same fp32 weights when it computes in fp64."""
    model = copy.deepcopy(described(case.vocabulary, case.tied, torch.float32).model)
    for module in model.modules():  # .double() on the modules would leave buffers in fp32 as they are rounded
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().double())
    model.tie_weights()
    return reference.train(model, data).weights


def in_microbatches(case: Case, data) -> dict[str, torch.Tensor]:
    """transformers itself, with its gradients accumulated over the microbatches."""
    model = copy.deepcopy(described(case.vocabulary, case.tied, torch.float32).model)
    optimizer = reference.adamw(model.parameters())
    for ids, labels in data:
        optimizer.zero_grad()
        valid = (labels[:, 1:] != reference.IGNORE).sum()
        for part, targets in zip(ids.chunk(case.microbatches), labels.chunk(case.microbatches), strict=True):
            loss = functional.cross_entropy(
                logits_of(model, part), targets[:, 1:].flatten(), ignore_index=reference.IGNORE, reduction="sum"
            )
            (loss / valid).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.sampled(1)
def test_fp32_is_as_close_as_fp32_can_be(processes: int, sample) -> None:
    cases = [Case(3, mode, 1003, tied) for mode in MODES for tied in (False, True)]
    faults = run_processes(in_fp32, processes, sample(cases, 4))
    assert not faults[0], "\n".join(faults[0])


def in_bf16(mode: str) -> None:
    """bf16 against fp32 in one process, measured by the error of bf16 in one process."""
    from test_gradients import llama

    model = llama(1003, False, torch.float32)
    pipeline = Pipeline(
        copy.deepcopy(model), vocabulary=mode, microbatches=2, compute_dtype=torch.bfloat16, self_check=False
    )
    errors = reference.Bf16Errors(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        ids = torch.randint(0, 1003, (4, 16), generator=generator)
        pipeline.zero_grad()
        loss = pipeline.step(ids).loss
        for parameter in pipeline.parameters():
            assert parameter.grad is None or parameter.grad.dtype == torch.float32
        found = pipeline.full_gradients()
        if pipeline.device == 0:
            errors.add(found, loss, ids)
    errors.check(mode)


@pytest.mark.parametrize("mode", ["first-last", "vocab-1", "vocab-2"])
@pytest.mark.sampled(1)
def test_bf16_errs_no_more_than_bf16_in_one_process(mode: str) -> None:
    run_processes(in_bf16, 2, mode)


# --- what goes into a step -------------------------------------------------------------------------------


def padded_positions_and_weights(mode: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 97, (4, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    mask[2, 3:] = 0
    positions = torch.arange(8).expand(4, 8) + 2
    weights = torch.rand(4, 8, dtype=FP64)
    model = whole()
    per_token = functional.cross_entropy(
        logits_of(model, ids, attention_mask=mask, position_ids=positions), ids[:, 1:].flatten(), reduction="none"
    )
    counted = (weights * mask)[:, 1:].flatten()
    expected = (per_token * counted).sum() / counted.sum()
    expected.backward()
    pipeline = make(mode)
    result = pipeline.step(ids, attention_mask=mask, position_ids=positions, token_weights=weights)
    assert result.loss == pytest.approx(expected.item(), rel=1e-12)
    assert result.tokens == int(mask[:, 1:].sum())
    assert_same_gradients(pipeline, model)
    pipeline.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(2)
def test_padding_positions_and_token_weights(mode: str) -> None:
    run_processes(padded_positions_and_weights, 2, mode)


def loss_options(mode: str) -> None:
    """Label smoothing, z-loss and the entropy, with what the output layer keeps, against autograd."""
    torch.manual_seed(0)
    ids = torch.randint(0, 97, (4, 8))
    for smoothing, z_loss, keep in ((0.1, 0.0, "probabilities"), (0.0, 1e-2, "nothing"), (0.1, 1e-2, "nothing")):
        model = whole()
        logits, targets = logits_of(model, ids), ids[:, 1:].flatten()
        plain = functional.cross_entropy(logits, targets, label_smoothing=smoothing)
        expected = plain + z_loss * torch.logsumexp(logits, -1).square().mean()
        expected.backward()
        pipeline = make(mode, loss=LossOptions(label_smoothing=smoothing, z_loss=z_loss, keep=keep, entropy=True))
        result = pipeline.step(ids)
        assert result.loss == pytest.approx(expected.item(), rel=1e-12)
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1).mean().item()
        assert result.entropy == pytest.approx(entropy, rel=1e-12)
        assert_same_gradients(pipeline, model)
        assert pipeline.evaluate(ids).entropy == pytest.approx(entropy, rel=1e-12)
        pipeline.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(2)
def test_loss_options(mode: str) -> None:
    run_processes(loss_options, 2, mode)


def lengths_and_repeats(mode: str) -> None:
    """Steps of different shapes, gradients that add up, and evaluation in between that leaves no trace."""
    pipeline, model = make(mode, tied=True), whole(tied=True)
    for shape in ((2, 5), (4, 9), (6, 3)):
        ids = torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(sum(shape)))
        expected = reference.loss_of(model, ids, ids)
        expected.backward()
        evaluated = pipeline.evaluate(ids if pipeline.device == 0 else None)
        assert evaluated.loss == pytest.approx(expected.item(), rel=1e-12)
        log_probabilities = torch.log_softmax(logits_of(model, ids), -1)
        wanted = log_probabilities.gather(1, ids[:, 1:].flatten()[:, None]).view(shape[0], shape[1] - 1)
        assert torch.allclose(evaluated.log_probabilities[:, :-1], wanted, rtol=1e-12)
        assert bool((evaluated.log_probabilities[:, -1] == 0).all())
        assert pipeline.step(ids if pipeline.device == 0 else None).loss == pytest.approx(expected.item(), rel=1e-12)
    assert_same_gradients(pipeline, model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert pipeline.clip_gradients(0.1) == pytest.approx(norm.item(), rel=1e-12)
    assert_same_gradients(pipeline, model)
    pipeline.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(2)
def test_steps_of_any_shape_evaluation_and_clipping(mode: str) -> None:
    run_processes(lengths_and_repeats, 3, mode)


def no_label_counts() -> None:
    for mode in MODES:
        pipeline = make(mode)
        ids = torch.randint(0, 97, (2, 5))
        assert pipeline.step(ids, torch.full_like(ids, -100)).loss == 0
        found = pipeline.full_gradients()
        assert all(not gradient.any() for gradient in found.values())
        pipeline.close()


def test_without_any_label_loss_and_gradients_are_zero() -> None:
    run_processes(no_label_counts, 2)


def frozen(mode: str) -> None:
    """Frozen matrices and layers get no gradient; all others get theirs."""
    model = whole()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "lm_head" not in name and "layers.1." not in name)
    ids = torch.randint(0, 97, (4, 6), generator=torch.Generator().manual_seed(0))
    pipeline = Pipeline(
        describe(copy.deepcopy(model)), vocabulary=mode, microbatches=2, parameter_dtype=FP64, self_check=False
    )
    reference.loss_of(model, ids, ids).backward()
    pipeline.step(ids)
    found = pipeline.full_gradients()
    if pipeline.device == 0:
        wanted = {name: gradient for name, gradient in gradients(model).items() if gradient is not None}
        error, name = reference.worst(found, wanted)
        assert error < 1e-10, f"{name}: {error:.1e}"
    pipeline.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(2)
def test_frozen_parameters(mode: str) -> None:
    run_processes(frozen, 2, mode)


# --- whole models ----------------------------------------------------------------------------------------


def capped_modules() -> None:
    """Plain modules have no config that says what they do to their logits: the caller does."""
    from torch import nn

    torch.manual_seed(0)
    embedding, head = nn.Embedding(97, 8, dtype=FP64), nn.Linear(8, 97, dtype=FP64)
    layers = [nn.Linear(8, 8, dtype=FP64) for _ in range(2)]
    loss = LossOptions(soft_cap=0.5, logit_scale=2.0)
    pipeline = Pipeline.from_modules(
        embedding, layers, None, head, microbatches=1, parameter_dtype=FP64, loss=loss, vocabulary="vocab-1"
    )
    ids = torch.randint(0, 97, (2, 5))
    found = pipeline.step(ids).loss
    logits = 0.5 * torch.tanh(2.0 * head(layers[1](layers[0](embedding(ids)))) / 0.5)
    expected = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-12)
    gradients = pipeline.full_gradients()
    if pipeline.device == 0:
        error, _ = reference.worst({"head": gradients["head.weight"]}, {"head": head.weight.grad})
        assert error < 1e-10


def test_plain_modules_may_have_a_soft_cap() -> None:
    run_processes(capped_modules, 2)


def plain_modules(mode: str, tied: bool) -> None:
    from torch import nn

    torch.manual_seed(0)
    embedding, head = nn.Embedding(97, 8, padding_idx=3, dtype=FP64), nn.Linear(8, 97, dtype=FP64)
    if tied:
        head.weight = embedding.weight
    layers = [nn.Sequential(nn.Linear(8, 8, dtype=FP64), nn.Tanh()) for _ in range(3)]
    norm = nn.LayerNorm(8, dtype=FP64)
    ids = torch.randint(0, 97, (4, 5))
    pipeline = Pipeline.from_modules(
        embedding, layers, norm, head, vocabulary=mode, microbatches=2, parameter_dtype=FP64
    )
    loss = pipeline.step(ids).loss
    found = pipeline.full_gradients()
    hidden = embedding(ids)
    for layer in layers:
        hidden = layer(hidden)
    expected = functional.cross_entropy(head(norm(hidden))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    if pipeline.device == 0:
        named = {"embedding.weight": embedding.weight, "head.bias": head.bias, "norm.weight": norm.weight}
        named |= {"layers.1.0.weight": layers[1][0].weight} | ({} if tied else {"head.weight": head.weight})
        error, name = reference.worst({name: found[name] for name in named}, {n: p.grad for n, p in named.items()})
        assert error < 1e-10, f"{name}: {error:.1e}"
        assert len(found) == len(named) + 2 * 3 - 1 + 1
    pipeline.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_plain_modules_make_a_pipeline(mode: str, tied: bool) -> None:
    run_processes(plain_modules, 2, mode, tied)


def saved(folder: str, mode: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 97, (4, 6), generator=torch.Generator().manual_seed(0))
    pipeline = make(mode, tied=tied)
    loss = pipeline.evaluate(ids).loss
    pipeline.save_pretrained(folder)
    if pipeline.device == 0:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=FP64)
        assert reference.loss_of(loaded, ids, ids).item() == pytest.approx(loss, rel=1e-6)
    dist.barrier()
    again = Pipeline(folder, vocabulary="vocab-1", microbatches=2, parameter_dtype=FP64, self_check=False)
    assert again.evaluate(ids).loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("mode", ["first-last", "vocab-2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sampled(2)
def test_a_saved_model_loads_in_transformers_and_here(tmp_path, mode: str, tied: bool) -> None:
    run_processes(saved, 2, str(tmp_path / "model"), mode, tied)


def lets_go() -> None:
    import gc
    import weakref

    from test_gradients import llama

    model = llama(97, True, FP64)
    model.generation_config.temperature = 0.3
    seen = weakref.ref(model)
    pipeline = Pipeline(model, microbatches=1, parameter_dtype=FP64, self_check=False)
    del model
    gc.collect()
    assert seen() is None
    assert pipeline.description.skeleton.generation_config.temperature == 0.3
    pipeline.step(IDS)


def test_a_live_model_is_copied_and_not_kept() -> None:
    run_processes(lets_go, 2)


def cannot_be_written(folder: str) -> None:
    from evenpipe.errors import RunError

    with pytest.raises(RunError, match="was not written"):
        make("vocab-2").save_pretrained(f"{folder}/file/model")


def test_a_folder_that_cannot_be_written_is_an_error_on_every_process(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    run_processes(cannot_be_written, 2, str(tmp_path))


def fresh(processes: int) -> dict[str, torch.Tensor]:
    """Weights drawn from a seed, in a layout that depends on the number of processes."""
    config = described(600, False, FP64).model.config
    mode = MODES[processes]
    pipeline = Pipeline(config, vocabulary=mode, microbatches=2, seed=7, self_check=False)
    return pipeline.full_state_dict()


def test_fresh_weights_do_not_depend_on_the_layout() -> None:
    weights = [run_processes(fresh, processes, processes)[0] for processes in (1, 2, 3, 4)]
    for other in weights[1:]:
        assert weights[0].keys() == other.keys()
        assert all(torch.equal(weights[0][name], other[name]) for name in other)


# --- schedules that are data -----------------------------------------------------------------------------


def schedules(folder: str) -> None:
    ids = torch.randint(0, 97, (3, 6), generator=torch.Generator().manual_seed(0))
    model = whole()
    reference.loss_of(model, ids, ids).backward()
    base = generate("1f1b", 2, 3)
    order = add_vocabulary(base, 1)
    for schedule in (
        base,
        order,
        f"{folder}/order.csv",
        lambda devices, microbatches: generate("gpipe", devices, microbatches),
    ):
        pipeline = make("vocab-2", microbatches=3, schedule=schedule)
        pipeline.step(ids)
        assert_same_gradients(pipeline, model)
        pipeline.close()


def test_a_schedule_is_a_name_an_order_a_file_or_a_function(tmp_path) -> None:
    (tmp_path / "order.csv").write_text(add_vocabulary(generate("1f1b", 2, 3), 1).to_csv())
    assert Order.from_csv((tmp_path / "order.csv").read_text()).barriers == 1
    run_processes(schedules, 2, str(tmp_path))


# --- bad input -------------------------------------------------------------------------------------------

IDS = torch.zeros(2, 4, dtype=torch.int64)
BAD_STEPS = {
    "input_ids: list, expected a torch.Tensor": {"input_ids": [[1, 2]]},
    "input_ids: the first process": {"input_ids": None},
    "multiple of the 2 microbatches": {"input_ids": torch.zeros(3, 4, dtype=torch.int64)},
    "expected [batch, sequence] torch.int64": {"input_ids": torch.zeros(2, 4)},
    "at most 32": {"input_ids": torch.zeros(2, 33, dtype=torch.int64)},
    "contains token 97, expected 0 to 96": {"input_ids": IDS + 97},
    "labels: contains -1": {"input_ids": IDS, "labels": IDS - 1},
    "labels: [2, 3]": {"input_ids": IDS, "labels": IDS[:, :3]},
    "padding on the right": {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])},
    "position_ids: from -1 to -1, expected at least 0": {"input_ids": IDS, "position_ids": IDS - 1},
    "rows of ones followed by zeros": {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0.5]] * 2)},
    "not a finite number": {"input_ids": IDS, "token_weights": torch.full((2, 4), float("nan"))},
    "token_weights: contains -1, expected 0 or more": {"input_ids": IDS, "token_weights": IDS - 1.0},
}


def bad_steps() -> None:
    pipeline = make("vocab-2")
    for text, arguments in BAD_STEPS.items():
        with pytest.raises(InputError) as caught:
            pipeline.step(**arguments)
        if pipeline.device == 0:
            assert text in str(caught.value)
        else:
            assert "first process" in str(caught.value)
    pipeline.step(IDS)  # and nothing is lost
    for wrong in ("1", 0, None, True):
        with pytest.raises(InputError, match=f"max_norm: {wrong!r}, expected a number above 0"):
            pipeline.clip_gradients(wrong)
    pipeline.close()
    for step in (pipeline.step, pipeline.evaluate):
        with pytest.raises(InputError, match="the pipeline is closed"):
            step(IDS)


def test_bad_steps_are_one_sentence_on_every_process() -> None:
    run_processes(bad_steps, 2)


def bad_extras() -> None:
    """What the model's forward does not take is refused before anything is sent, on every process."""
    from torch import nn

    embedding, head = nn.Embedding(97, 8), nn.Linear(8, 97)
    pipeline = Pipeline.from_modules(embedding, [nn.Linear(8, 8), nn.Linear(8, 8)], None, head, microbatches=1)
    for name in ("position_ids", "attention_mask"):
        with pytest.raises(InputError) as caught:
            pipeline.step(IDS, **{name: torch.ones_like(IDS)})
        assert pipeline.device or f"{name}: the model does not take it" in str(caught.value)
    learned = Pipeline(describe(whole_model(tiny_config("gpt2"))), microbatches=1, self_check=False)
    with pytest.raises(InputError) as caught:
        learned.step(IDS, position_ids=IDS + 10_000)
    assert learned.device or "position_ids: from 10000" in str(caught.value)
    learned.step(IDS)


def test_inputs_that_the_model_does_not_take() -> None:
    run_processes(bad_extras, 2)


NO_GPU = {"torch_device: 'cuda', but torch finds no GPU": {"mode": "vocab-2", "torch_device": "cuda"}}


def bad_pipelines() -> None:
    for text, options in {
        "did you mean 'vocab-2'": {"mode": "vocab2"},
        "did you mean '1f1b'": {"mode": "vocab-2", "schedule": "1f1"},
        "microbatches: 0": {"mode": "vocab-2", "microbatches": 0},
        "layers_per_stage: [1, 2]": {"mode": "vocab-2", "layers_per_stage": [1, 2]},
        "compute_dtype: torch.float32, expected torch.float64": {"mode": "vocab-2", "compute_dtype": torch.float32},
        "ignore_index is -1, expected -100": {"mode": "vocab-2", "loss": LossOptions(ignore_index=-1)},
        "soft_cap is 30.0, expected None": {"mode": "vocab-2", "loss": LossOptions(soft_cap=30.0)},
        "0D0 is missing": {
            "mode": "first-last",
            "schedule": Order.from_csv("0F0,0F1,0O0,0L0,0B0,0B1\n1F0,1B0,1F1,1B1"),
        },
        "torch_device: 'gpu'": {"mode": "vocab-2", "torch_device": "gpu"},
        **({} if torch.cuda.is_available() else NO_GPU),
        "torch_device: 'meta', expected 'cpu' or 'cuda'": {"mode": "vocab-2", "torch_device": "meta"},
        "torch_device: 7 is not a device": {"mode": "vocab-2", "torch_device": 7},
        "timeout_seconds: 0": {"mode": "vocab-2", "timeout_seconds": 0},
        "timeout_seconds: '9', expected a number": {"mode": "vocab-2", "timeout_seconds": "9"},
        "vocabulary: None, expected the name": {"mode": None},
        "schedule: <lambda>(devices, microbatches) cannot": {"mode": "vocab-2", "schedule": lambda: None},
        "schedule_options: 5, expected a dictionary": {"mode": "vocab-2", "schedule_options": 5},
        "layers_per_stage: 2, expected whole numbers": {"mode": "vocab-2", "layers_per_stage": 2},
        "mesh: 5, expected a torch.distributed DeviceMesh": {"mode": "vocab-2", "mesh": 5},
        "loss: 5, expected LossOptions": {"mode": "vocab-2", "loss": 5},
        "costs: 5, expected Costs": {"mode": "vocab-2", "costs": 5},
        "seed: 'a', expected a whole number": {"mode": "vocab-2", "seed": "a"},
        "compile_layers: 'no', expected True or False": {"mode": "vocab-2", "compile_layers": "no"},
    }.items():
        with pytest.raises(InputError) as caught:
            make(**options)
        assert text in str(caught.value)


def one_pipeline_without_a_group(folder: str) -> int:
    """As under torchrun: the environment is there, and no process group yet."""
    assert not dist.is_initialized()
    pipeline = make("vocab-2")
    assert pipeline.devices == dist.get_world_size() == 2
    return pipeline.device


def test_under_torchrun_a_pipeline_opens_the_group_itself() -> None:
    assert run_processes(one_pipeline_without_a_group, 2, "", group=False) == [0, 1]


def the_norm_alone() -> None:
    pipeline = make("vocab-2")
    pipeline.step(IDS)
    before = pipeline.full_gradients()
    assert pipeline.clip_gradients(float("inf")) > 0
    after = pipeline.full_gradients()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_infinite_norm_only_measures() -> None:
    run_processes(the_norm_alone, 2)


def looped(devices: int, microbatches: int) -> Order:
    """GPipe with two stages per device."""
    placement = Placement.looped(devices, 2)
    rows = [
        [Pass(Kind.F, stage, i) for stage in placement.stages_of(device) for i in range(microbatches)]
        + [Pass(Kind.B, stage, i) for stage in reversed(placement.stages_of(device)) for i in range(microbatches)]
        for device in range(devices)
    ]
    return Order(placement, microbatches, tuple(map(tuple, rows)))


def several_stages_per_device() -> None:
    ids = torch.randint(0, 97, (3, 6), generator=torch.Generator().manual_seed(0))
    for tied in (False, True):
        model = whole(tied)
        reference.loss_of(model, ids, ids).backward()
        for mode in ("first-last", "vocab-1", "vocab-2"):
            pipeline = make(mode, tied=tied, microbatches=3, schedule=looped)
            pipeline.step(ids)
            assert_same_gradients(pipeline, model)
            assert pipeline.predict().makespan < pipeline.predict("first-last").makespan or mode == "first-last"
            pipeline.close()


def test_a_function_may_place_several_stages_on_a_device() -> None:
    run_processes(several_stages_per_device, 2)


def more_devices_than_layers() -> None:
    for mode in MODES:
        with pytest.raises(InputError, match="4 layers"):
            make(mode)


def test_bad_arguments_are_one_sentence() -> None:
    run_processes(bad_pipelines, 2)
    run_processes(more_devices_than_layers, 5)


# --- autocast --------------------------------------------------------------------------------------------


def under_autocast() -> None:
    """Neither silently in two dtypes nor an error from within the backward; outside of it everything is as ever."""
    ids = torch.arange(24).reshape(4, 6)
    for schedule in ("1f1b", "zb-h1"):
        pipeline = make("vocab-2", schedule=schedule)
        for run in (pipeline.step, pipeline.evaluate):
            with (
                torch.autocast("cpu", torch.bfloat16),
                pytest.raises(InputError, match=r"^torch.autocast is on, .*: Pipeline\(compute_dtype=torch.bfloat16\)"),
            ):
                run(ids)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            pipeline.step(ids)
        model = whole()
        functional.cross_entropy(logits_of(model, ids), ids[:, 1:].flatten()).backward()
        assert_same_gradients(pipeline, model)
        pipeline.close()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.sampled(1)
def test_autocast_is_refused(processes: int) -> None:
    run_processes(under_autocast, processes)
