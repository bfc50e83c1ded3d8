"""What systemd says of units, from its own output."""

from launcher.agent.checks.unit_states import UnitStates, read_properties, show_units
from launcher.session.processes import boot_id

SHOWN = """\
Id=motley-worker@demo:worker-0.service
LoadState=loaded
ActiveState=activating
SubState=auto-restart
UnitFileState=enabled
Result=signal

Id=motley-worker@demo:worker-1.service
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=
Result=success
"""


def test_paragraphs_of_properties() -> None:
    units = read_properties(SHOWN)
    assert list(units) == [f"motley-worker@demo:worker-{rank}.service" for rank in (0, 1)]
    assert units["motley-worker@demo:worker-0.service"] == {
        "LoadState": "loaded",
        "ActiveState": "activating",
        "SubState": "auto-restart",
        "UnitFileState": "enabled",
        "Result": "signal",
    }
    assert units["motley-worker@demo:worker-1.service"]["UnitFileState"] == ""
    assert read_properties("") == {}


def test_a_machine_without_systemd_has_no_units() -> None:
    assert show_units([]) == UnitStates(boot_id(), {})
    asked = show_units(["motley-worker@never:worker-0.service"])
    assert asked.boot == boot_id()
    for properties in asked.units.values():
        assert properties["ActiveState"] == "inactive"
