"""The five turns of a Korean runner: what each new note links to and which older note it changes.

Run it with the embedded model, or name a stronger one, which will write far better Korean:

    python examples/korean_runner.py
    python examples/korean_runner.py openai/gpt-4o-mini
"""

from __future__ import annotations

import sys
import tempfile

from amem_dspy import AgenticMemory, Note

TURNS = [
    ("2026-07-20T10:00+09:00", "나는 매주 주말 여의도 한강공원에서 10km를 달려."),
    ("2026-08-03T21:00+09:00", "가을에 있는 10km 대회를 목표로 훈련을 시작했어."),
    ("2026-08-17T09:30+09:00", "무릎이 아파서 요즘은 달리지 않고 잠실에서 걷고 있어."),
    ("2026-08-24T18:00+09:00", "의사가 2주 동안 달리기를 쉬고 스트레칭만 하라고 했어."),
    ("2026-09-08T07:00+09:00", "오늘 3km를 천천히 달려 봤어. 10km는 당분간 안 뛸 거야."),
]


def show(note: Note) -> None:
    print(f"  태그 {', '.join(note.tags)} | 키워드 {', '.join(note.keywords)}")
    print(f"  맥락 {note.context}")


def main() -> None:
    lm = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder, AgenticMemory(folder, lm=lm) as memory:
        for moment, turn in TURNS:
            before = {note.id: note for note in memory.all()}
            note = memory.add(turn, timestamp=moment, thread="runner")
            print(f"\n[{moment[:10]}] {turn}")
            show(note)
            for link in note.links:
                print(f"  연결 -> {before[link.id].content} ({link.strength:.1f}) {link.reason}")
            evolved = [
                n for n in memory.all() if n.id in before and n.context != before[n.id].context
            ]
            for changed in evolved:
                print(f"  진화: {changed.content}")
                print(f"    전: {before[changed.id].context}\n    후: {changed.context}")
            links = sum(len(n.links) for n in memory.all()) // 2
            print(f"  = 노트 {memory.count()}개, 연결 {links}개, 이번에 바뀐 노트 {len(evolved)}개")


if __name__ == "__main__":
    main()
