"""Builds the seccomp filter of the system calls that a program may make; the launcher installs it.

All that is not listed here is refused, also what later kernels add: sockets of every family, System V and POSIX message queues,
semaphores and shared memory, namespaces and mounts, tracing and changing other processes, keys, io_uring, userfaultfd, BPF,
locks of files, files in memory. Only what follows the kernel's interface is named; the numbers are those of its headers.
"""

import platform
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from attrs import frozen

Instruction: TypeAlias = tuple[int, int, int, int | str]
"""Code, jumps where true and false, and operand of classic BPF."""
OWN = "own process"
"""A placeholder operand that the launcher replaces by the program's process id."""
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of each architecture, and its column in the lists below."""
ALLOWED = """
read:0:63 write:1:64 brk:12:214 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 rseq:334:293
set_robust_list:273:99 set_tid_address:218:96 futex:202:98 arch_prctl:158
openat:257:56 open:2 close:3:57 close_range:436:436 newfstatat:262:79 stat:4 fstat:5:80 lstat:6 statx:332:291 lseek:8:62
pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287
access:21 faccessat:269:48 faccessat2:439:439 pipe:22 pipe2:293:59 dup:32:23 dup2:33 dup3:292:24 select:23 pselect6:270:72
poll:7 ppoll:271:73 epoll_create:213 epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232 epoll_pwait:281:22 sendfile:40:71
copy_file_range:326:285 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 getdents:78 getdents64:217:61
getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82 renameat:264:38 renameat2:316:276 rmdir:84 creat:85 link:86 linkat:265:37
unlink:87 unlinkat:263:35 symlink:88 symlinkat:266:36 readlink:89 readlinkat:267:78 umask:95:166 statfs:137:43 fstatfs:138:44
msync:26:227 fadvise64:221:223 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12
flistxattr:196:13 fork:57 vfork:58 execve:59:221 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgrp:111 getpgid:121:155 getsid:124:156 rt_sigaction:13:134
rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pause:34 alarm:37 getitimer:36:102
setitimer:38:103 restart_syscall:219:128 times:100:153 getrusage:98:165 sysinfo:99:179 uname:63:160 getrlimit:97:163
setrlimit:160:164 getpriority:140:141 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 getcpu:309:168
clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201
getrandom:318:278 sendto:44:206 recvfrom:45:207 shutdown:48:210 getsockname:51:204 getpeername:52:205 getsockopt:55:209
"""
"""name:number on x86_64:number on aarch64, which lacks some."""
ALLOWED_IN_NAMESPACES = "mkdir:83 mkdirat:258:34 setsid:112:157 setpgid:109:154 tkill:200:130"
"""Without namespaces a program stays in one folder and one session, by which it is found and ended."""
CHANGES_OF_OWN_FILES = """
chmod:90 fchmod:91:52 fchmodat:268:53 utime:132 utimes:235 utimensat:280:88 futimesat:261
"""
"""Calls that Landlock does not bound: without namespaces they would change all files of the program's user. There they seem to
work and change nothing, so that copies of files go on."""
RULED = """
clone:56:220 fallocate:285:47 fcntl:72:25 ioctl:16:29 kill:62:129 prctl:157:167 prlimit64:302:261
socketpair:53:199 tgkill:234:131
"""
NEW_NAMESPACES_OR_PARENT = 0x7E028000
"""Flags of clone that make namespaces, and CLONE_PARENT."""
ALL = 0xFFFFFFFF


@frozen
class Condition:
    """The values that the lower 32 bits of an argument may have, under a mask."""

    argument: int
    values: tuple[int | str, ...]
    mask: int = ALL


RULES: dict[str, tuple[Condition, ...]] = {
    "clone": (Condition(0, (0,), NEW_NAMESPACES_OR_PARENT),),
    "fallocate": (Condition(1, (0,)),),  # other modes take space beyond the largest size of a file
    # Duplicates, flags and the size of pipes. No locks, which other programs see, and no owner, whom signals are sent to.
    "fcntl": (Condition(1, (0, 1, 2, 3, 4, 1030, 1032)),),
    "ioctl": (Condition(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    "prctl": (Condition(0, (15, 16, 0x53564D41)),),  # names of threads and of memory
    "prlimit64": (Condition(0, (0,)),),
    "socketpair": (Condition(0, (1,)), Condition(1, (1,), 0xF)),  # AF_UNIX, SOCK_STREAM
}
SIGNALS = {"kill": (0, OWN), "tgkill": (OWN,)}
"""The condition of signals without a process namespace: the program itself receives them."""
LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
KILL_PROCESS, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's `seccomp_data`."""


def unsupported() -> str | None:
    """Return the reason why this machine cannot have a filter; None where it can."""
    machine = platform.machine()
    return (
        None if machine in ARCHITECTURES else f"found a processor of the type {machine}; expected {' or '.join(ARCHITECTURES)}"
    )


def call_filter(isolation: Literal["namespaces", "limits"]) -> list[Instruction]:
    """Return the filter's instructions. KeyError on another architecture."""
    architecture, column = ARCHITECTURES[platform.machine()]
    rules = {name: RULES.get(name, ()) for name in _numbers(RULED, column)}
    if isolation == "limits":
        rules |= {name: (Condition(0, targets),) for name, targets in SIGNALS.items()}
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
    ]
    outcomes = dict.fromkeys(_numbers(ALLOWED, column).values(), ALLOW)
    outcomes |= dict.fromkeys(_numbers(CHANGES_OF_OWN_FILES, column).values(), ALLOW if isolation == "namespaces" else ERRNO)
    if isolation == "namespaces":
        outcomes |= dict.fromkeys(_numbers(ALLOWED_IN_NAMESPACES, column).values(), ALLOW)
    for number, outcome in outcomes.items():
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, outcome)]
    for name, number in _numbers(RULED, column).items():
        body = [*_conditions(rules[name]), (RETURN, 0, 0, ALLOW)]
        program += [(EQUAL, 0, len(body), number), *body]
    return [*program, (RETURN, 0, 0, ERRNO | ENOSYS)]


def _numbers(listed: str, column: int) -> dict[str, int]:
    entries = [entry.split(":") for entry in listed.split()]
    return {name: int(numbers[column]) for name, *numbers in entries if column < len(numbers)}


def _conditions(conditions: Sequence[Condition]) -> Iterator[Instruction]:
    for condition in conditions:
        yield (LOAD, 0, 0, ARGUMENTS + 8 * condition.argument)
        yield (AND, 0, 0, condition.mask)
        for left, value in zip(range(len(condition.values), 0, -1), condition.values, strict=True):
            yield (EQUAL, left, 0, value)
        yield (RETURN, 0, 0, ERRNO | EPERM)
