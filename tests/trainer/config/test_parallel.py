import pytest

from trainer.config.run import RunConfig, load_config
from trainer.system.errors import InputError


def config(**settings: object) -> RunConfig:
    base = {"num_classes": 5, "model.path": "model", "data.train": "train.jsonl"}
    return load_config(None, base | {f"parallel.{key}": value for key, value in settings.items()})


def test_what_is_not_given_is_one_whole_model_a_process() -> None:
    assert config().parallel.is_ddp_only
    assert config().parallel.count_copies(3) == 3


def test_members_need_not_agree_on_it_and_a_run_resumes_under_another() -> None:
    plain, cut = config(), config(data="fsdp", tensor=2, sequence=True)
    assert plain.agreement_digest() == cut.agreement_digest()
    assert plain.list_changes(cut) == []


@pytest.mark.parametrize(
    ("settings", "world", "copies"),
    [
        ({"data": "fsdp"}, 8, 8),
        ({"tensor": 2, "data": "fsdp"}, 8, 4),
        ({"tensor": 2}, 2, 1),
        ({"pipeline.stages": 4}, 8, 2),
    ],
)
def test_sizes_multiply_to_the_world(settings: dict[str, object], world: int, copies: int) -> None:
    assert config(**settings).parallel.count_copies(world) == copies


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        ({"tensor": 2}, 3, "tensor 2 x pipeline.stages 1 = 2 does not divide the world of 3"),
        ({"pipeline.stages": 4}, 2, "1 x pipeline.stages 4 = 4 does not divide the world of 2"),
        ({"tensor": 2}, 4, "makes 2 copies, which need data fsdp; set parallel.data=fsdp"),
    ],
)
def test_what_does_not_divide_is_refused(
    settings: dict[str, object], world: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        config(**settings).parallel.count_copies(world)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "zero"}, "parallel.data: input should be 'ddp' or 'fsdp'; got 'zero'"),
        ({"tensor": 0}, "parallel.tensor: input should be greater than 0; got 0"),
        ({"sequence": True}, "parallel: sequence needs tensor 2 or more"),
        ({"tensor": 2, "pipeline.stages": 2}, "tensor 2 with pipeline.stages 2 is not supported"),
        (
            {"data": "fsdp", "pipeline.stages": 2},
            "data fsdp with pipeline.stages 2 is not supported: set data ddp",
        ),
        (
            {"pipeline.stages": 4, "pipeline.microbatches": 3},
            "schedule 1f1b over 4 stages needs 4 microbatches or more, not 3",
        ),
        (
            {"pipeline.schedule": "interleaved", "pipeline.stages": 2, "pipeline.microbatches": 5},
            "schedule interleaved over 2 stages needs a multiple of 2 microbatches, not 5",
        ),
        ({"pipeline.schedule": "none"}, "parallel.pipeline.schedule: input should be 'gpipe', '1f"),
        ({"tensors": 2}, "parallel.tensors: unknown key .*did you mean: parallel.tensor$"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(**settings)


def test_a_model_has_a_layer_for_each_stage() -> None:
    settings = config(**{"pipeline.stages": 2, "pipeline.schedule": "zbv"}).parallel.pipeline
    settings.check_layers(4)
    message = (
        "zbv over 2 stages needs 4 layers, the model has 3; set fewer stages, or schedule 1f1b"
    )
    with pytest.raises(InputError, match=message):
        settings.check_layers(3)
    config().parallel.pipeline.check_layers(1)
