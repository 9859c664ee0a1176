"""Broken kernels to mend: each Hopper step with one fault in its synchronisation.

    python tutorials/mend.py 07             # writes a broken copy of step 7; once it is there, checks it
    python tutorials/mend.py 07 --solution  # shows what was changed

The copy is checked in the emulator, with the step's own cases: a GPU may compute right results with a race in
the kernel for a long time. What it says is explained in docs/emulator.md, "Read a report".
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import common

FOLDER = Path(__file__).resolve().parent
COPIES = FOLDER / "mend"


class Fault(NamedTuple):
    """`text` of a step is replaced by `by`. `story`: what one sees of it; `why`: the rule that it breaks."""

    step: str
    story: str
    text: str
    by: str
    why: str


FAULTS = {
    "02": Fault(
        "02_tma_copy",
        "The copy hangs, or it does not: that depends on which half of the bytes lands first.",
        "cute.size_in_bytes(dtype, smem_layout))",
        "cute.size_in_bytes(dtype, smem_layout) // 2)",
        "The bytes that are announced are those of the whole box, in bytes.",
    ),
    "03": Fault(
        "03_pipeline",
        "With one stage the sums are right, with three they are not always.",
        "stage, phase = k % stages, (k // stages) & 1",
        "stage, phase = k % stages, k & 1",
        "A phase is one use of a stage, so it changes once in a turn of the ring.",
    ),
    "04": Fault(
        "04_warp_roles",
        "The sums are right on an idle GPU. With many CTAs an SM a row is now and then from the next tile.",
        """        cute.autovec_copy(tXsX[None, None, None, state.index], mine)
        acc.store(acc.load() + mine.load())
        cute.arch.sync_warp()  # all 32 lanes have read before one of them says so
        ring.consumer_release(state)
""",
        """        ring.consumer_release(state)
        cute.autovec_copy(tXsX[None, None, None, state.index], mine)
        acc.store(acc.load() + mine.load())
        cute.arch.sync_warp()
""",
        "A stage is given back when its last read is done: by all lanes for which one arrives.",
    ),
    "05": Fault(
        "05_wgmma_tile",
        "The product is right with A in shared memory. With A in registers it is not.",
        '    """\n    warpgroup.fence()\n    tiled_mma.set',
        '    """\n    tiled_mma.set',
        "Registers that threads wrote need a fence before WGMMA reads them.",
    ),
    "06": Fault(
        "06_gemm_simple",
        "One K tile is right, nearly always. With more, blocks of D are wrong, and other ones each time.",
        "        warpgroup.wait_group(0)\n        cute.arch.sync_threads()",
        "        cute.arch.sync_threads()",
        "A barrier of threads does not wait for WGMMAs: they still read the tile that is overwritten.",
    ),
    "07": Fault(
        "07_gemm_warp_specialized",
        "Right with many stages, wrong with two.",
        "warpgroup.wait_group(1)  # all but the newest are done, so the stage before it is free",
        "warpgroup.wait_group(2)",
        "The stage that is released is the one before the newest; two groups may still read it.",
    ),
    "08": Fault(
        "08_gemm_persistent",
        "Right without clusters. With them, once in many launches: unspecified launch failure.",
        "    ring.producer_tail(\n        state\n    )  # the other CTA still signals this one's barriers: "
        "do not leave before it is done\n",
        "",
        "A CTA may not end while its peers still arrive on its barriers.",
    ),
    "09": Fault(
        "09_gemm_epilogue",
        "Elements of D are those of another tile, a few in a million.",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        "",
        "TMA reads through the async proxy: what threads have stored needs a fence before it.",
    ),
    "10": Fault(
        "10_flash_attention",
        "The output is off by a little, as if the last block had a weight of its own.",
        "    warpgroup.wait_group(0)\n    ring.consumer_release(behind)\n    rescale",
        "    ring.consumer_release(behind)\n    rescale",
        "The product with V has to end before its stage is released and its accumulators are rescaled.",
    ),
    "11": Fault(
        "11_attention_blocks",
        "Right for packed rows that fill the last tile. For others it reads what is not its own.",
        "    row = cutlass.min(row, keys - 1)  # the last tile reaches over the end\n",
        "",
        "A tile at the edge has rows that do not exist; tables are read only for those that do.",
    ),
    "12": Fault(
        "12_bsr_gemm",
        "Right with one consumer warpgroup, wrong with two.",
        "tile.stage_bytes, step7.CONSUMERS * 4, (1, 1))",
        "tile.stage_bytes, 4, (1, 1))",
        "A stage is empty when each warp that reads it has arrived: four of each warpgroup.",
    ),
}


def broken(number: str) -> str:
    """The source of a step with its fault."""
    fault = FAULTS[number]
    source = (FOLDER / f"{fault.step}.py").read_text()
    assert source.count(fault.text) == 1, f"step {number} does not have the text of its fault once"
    return source.replace(fault.text, fault.by)


def solution(number: str) -> str:
    """The fault as a diff from the broken copy to the step, and the rule."""
    fault = FAULTS[number]
    step = (FOLDER / f"{fault.step}.py").read_text()
    lines = difflib.unified_diff(
        broken(number).splitlines(), step.splitlines(), "broken", fault.step, "", "", 1
    )
    return "\n".join([*(line.rstrip() for line in lines), "", fault.why])


def findings(path: Path) -> str:
    """The fault of a copy of a step: reports of the emulator, or a wrong result; empty if it has none."""
    from lowering import LoweringError
    from lowering.emulator import EmulatorError
    from reference.tolerance import ToleranceError

    try:
        _load(path).check(common.Lab(common.EMULATOR))
    except EmulatorError as error:
        return "\n".join(str(report) for report in error.reports) or str(error)
    except ToleranceError as error:
        return f"the synchronisation is right, the result is not: {error}"
    except LoweringError as error:
        return f"it does not compile: {error}"
    return ""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mend_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Command line: write a broken copy, or check the one that is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("step", choices=FAULTS)
    parser.add_argument("--solution", action="store_true", help="show what was changed, and why it is wrong")
    asked = parser.parse_args()
    fault = FAULTS[asked.step]
    copy = COPIES / f"{fault.step}.py"
    if asked.solution:
        print(solution(asked.step))
        return 0
    if not copy.exists():
        COPIES.mkdir(exist_ok=True)
        copy.write_text(broken(asked.step))
        print(f"{fault.story}\nMend {copy} and run this again.\n")
    wrong = findings(copy)
    print(f"Wrong: {wrong}" if wrong else "Right.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
