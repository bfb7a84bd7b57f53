"""A seccomp filter for generated code: one process, no sockets, no memory outside the address-space limit.

The namespaces hide the machine and the rlimits bound one process; this filter closes what both leave open. RLIMIT_NPROC
does not bind root, also not root mapped to another id in a user namespace, so process creation itself is refused, and
with it threads. Memory that RLIMIT_AS does not count (System V segments, memfd) and doors into the kernel that a
Python exercise never needs (sockets of families without a namespace, mounts, ptrace, bpf, keys …) are refused as well.

Source: linux/seccomp.h, linux/filter.h, and the system-call tables of Linux (x86: syscall_64.tbl; arm64: asm-generic).
"""

from __future__ import annotations

import errno
import struct

# name: (x86-64, arm64); None: the architecture has no such call
REFUSED: dict[str, tuple[int, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}

# machine: (audit architecture, column of the table)
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
X32_BIT = 0x40000000  # x86-64 calls of the x32 ABI carry this bit and would slip past the numbers above

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
ALLOW, KILL = 0x7FFF0000, 0x80000000  # SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS
REFUSE = 0x00050000 | errno.EPERM  # SECCOMP_RET_ERRNO
NUMBER_AT, ARCHITECTURE_AT = 0, 4  # offsets in struct seccomp_data


def filter_program(machine: str) -> bytes | None:
    """The filter as an array of ``struct sock_filter`` for ``bwrap --seccomp``; None for a machine without a table.

    Args:
        machine: as ``platform.machine()`` gives it.
    """
    if machine not in MACHINES:
        return None
    architecture, column = MACHINES[machine]
    numbers = [number for number in (call[column] for call in REFUSED.values()) if number is not None]
    rows = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
    ]
    # a match jumps over the comparisons that are left and over ALLOW
    rows += [(EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    rows += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *row) for row in rows)
