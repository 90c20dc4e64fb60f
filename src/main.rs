//! Arguments in, exit code out.

use std::process::ExitCode;

/// Per-thread heaps: lanes allocate and free on their own cores.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    corelane::cli::run(std::env::args_os().skip(1))
}
