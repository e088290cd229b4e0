"""The kernel's protections for a sandboxed process, one function each; they raise OSError if the kernel refuses.

They make system calls through ctypes, because `os.unshare` needs Python 3.12 and the standard library has no module
for seccomp or Landlock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# In the order in which they are set up. `sandbox.sandbox_layers` finds out which of them work on this machine.
LAYERS = ("userns", "network", "pids", "files", "landlock", "uid", "capabilities", "seccomp")

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
NEW_NAMESPACES = 0x7E020000  # the flags above, and those for cgroups and the host name
SOCK_STREAM = 1
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_FDCWD, AT_RECURSIVE = 1, 2, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP = 1, 4, 8, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 36, 38, 47, 2
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2

SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
INNER_FOLDER = "/sandbox"
# The program's files are kept in memory and disappear with the sandbox.
SCRATCH_MB = 64
SCRATCH_FILES = 20_000  # files and folders; empty ones use memory too

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(RuntimeError):
    """The sandbox could not be set up, so the program was not run."""

    def __init__(self, layer: str, reason: str):
        super().__init__(f"the sandbox could not be set up ({layer}): {reason}")
        self.layer, self.reason = layer, reason


def prctl(option: int, *arguments: object) -> None:
    _check(_libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)))


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def enter_user_namespace() -> None:
    """Enter a user namespace, in which a user other than root may create other namespaces. The user id stays."""
    uid, gid = os.getuid(), os.getgid()
    unshare(NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_own_root(mount_point: str, prefixes: list[str], uid: int | None) -> None:
    """Enter a file system with only the interpreter and the system libraries, read only, and a folder in memory.

    It has no /proc, /home or /etc: what is not mounted cannot be read.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount(
        "tmpfs", mount_point, "tmpfs", MS_NOSUID | MS_NODEV, f"size={SCRATCH_MB}m,nr_inodes={SCRATCH_FILES},mode=755"
    )
    os.umask(0o022)
    shown: list[str] = []
    for path in (*SYSTEM_FOLDERS, *prefixes):
        if os.path.lexists(path) and not any(path == p or path.startswith(p + "/") for p in shown):
            _show(path, mount_point + path, read_only=True)
            shown.append(path)
    for path in DEVICES:
        _show(path, mount_point + path, read_only=False)
    for folder in ("/dev/shm", INNER_FOLDER):
        os.makedirs(mount_point + folder)
        if uid is not None:
            os.chown(mount_point + folder, uid, uid)
    os.chdir(mount_point)
    # With the same folder as new root and as place for the old root, the old root is mounted on top of the new one,
    # and is then unmounted.
    _check(_libc.syscall(_SYSCALLS["pivot_root"], b".", b"."))
    _check(_libc.umount2(b".", MNT_DETACH))
    os.chdir(INNER_FOLDER)


def restrict_with_landlock(readable: list[str], writable: list[str]) -> None:
    """Allow reading only below `readable` and writing only below `writable`; newer kernels also forbid TCP and signals
    to other processes."""
    create, add_rule, restrict = 444, 445, 446
    abi = _libc.syscall(create, None, ctypes.c_size_t(0), 1)
    _check(abi)
    bits = 13 + (abi >= 2) + (abi >= 3)  # 13 rights; ABI 2 adds moving between folders, ABI 3 adds truncation
    everything = (1 << bits) - 1
    read = 0b1101  # execute, read a file, read a folder
    file_only = everything & (0b111 | 1 << 14)
    # ABI 4 adds TCP; ABI 6 adds abstract Unix sockets and signals.
    fields = [everything] + ([3] if abi >= 4 else []) + ([3] if abi >= 6 else [])
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(ruleset)
    for paths, access in ((readable, read), (writable, everything)):
        for path in paths:
            if not os.path.exists(path):
                continue
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = access if os.path.isdir(path) else access & file_only
            _check(_libc.syscall(add_rule, ruleset, 1, struct.pack("=Qi", allowed, fd), 0))
            os.close(fd)
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _check(_libc.syscall(restrict, ruleset, 0))
    os.close(ruleset)


def change_user(uid: int, keep_search: bool) -> None:
    """Become the user `uid` without capabilities; `keep_search` keeps the one to enter folders closed to that user."""
    if keep_search:
        prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep_search:
        try:
            _keep_capabilities(CAP_DAC_READ_SEARCH)
        except PermissionError:  # containers usually take this capability away from root
            _keep_capabilities(CAP_DAC_OVERRIDE)


def drop_capabilities() -> None:
    """Drop every capability. PR_SET_NO_NEW_PRIVS must be set, so that programs started later do not regain any."""
    _keep_capabilities()


def _keep_capabilities(*kept: int) -> None:
    bits = sum(1 << number for number in kept)
    version_3 = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(version_3, struct.pack("=6I", bits, bits, bits, 0, 0, 0)))
    for number in kept:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0)


def refuse_system_calls() -> None:
    """Install a seccomp filter: sockets, tracing, namespaces, mounts, memory outside the limits and exotic calls fail.

    They fail with EPERM. Connected socket pairs stay allowed, because asyncio and multiprocessing need them.
    """
    if not _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"system call numbers of {os.uname().machine} are not known")
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    load, keep_bits, jump_equal, jump_at_least, jump_any_bit, give = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
    first_argument, second_argument = 16, 24
    clone, clone3, socketpair = (numbers[_column] for numbers in ((56, 220), (435, 435), (53, 199)))
    numbers = sorted(_SYSCALLS.values())
    program = [
        (load, 0, 0, 4),  # the architecture, on which call numbers depend
        (jump_equal, 1, 0, _AUDIT_ARCH),
        (give, 0, 0, refuse),
        (load, 0, 0, 0),  # the number of the call
        # The flags of clone3 are in memory, which a filter cannot read. On ENOSYS, the C library falls back to clone.
        (jump_equal, 0, 1, clone3),
        (give, 0, 0, unknown),
        (jump_equal, 0, 4, clone),  # allow processes and threads, but no namespaces
        (load, 0, 0, first_argument),
        (jump_any_bit, 0, 1, NEW_NAMESPACES),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
        (jump_equal, 0, 5, socketpair),  # only stream sockets: a datagram socket of a pair can send to any other
        (load, 0, 0, second_argument),
        (keep_bits, 0, 0, 0xF),
        (jump_equal, 1, 0, SOCK_STREAM),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
        # Jump offsets count from the next instruction. The last instruction refuses; the one before it allows.
        (jump_at_least, len(numbers) + 1, 0, 0x40000000),  # the x32 calls of x86-64
        *((jump_equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(PR_SET_SECCOMP, 2, header)


def _show(path: str, target: str, read_only: bool) -> None:
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, MS_BIND | MS_REC)
    if read_only:
        # Make the mount and all mounts below it read-only. Before Linux 5.12, only single mounts can be changed.
        flags = struct.pack("=4Q", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
        call = _SYSCALLS["mount_setattr"]
        if _libc.syscall(call, AT_FDCWD, target.encode(), AT_RECURSIVE, flags, ctypes.c_size_t(len(flags))) == 0:
            return
        # In a user namespace, a remount may add flags but not remove any.
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
        relative = MS_RELATIME if os.statvfs(target).f_flag & os.ST_RELATIME else 0
        _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept | relative)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_NUMBERS = {  # x86-64, 64-bit ARM
    "socket": (41, 198),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_column, _AUDIT_ARCH = _MACHINES.get(os.uname().machine, (0, 0))
_SYSCALLS = {name: numbers[_column] if _AUDIT_ARCH else -1 for name, numbers in _NUMBERS.items()}
