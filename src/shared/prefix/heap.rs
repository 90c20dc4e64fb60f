//! One setting of the binary's allocator (mimalloc) without which the trees' memory grows beyond what they count.
//!
//! Takes nothing, gives nothing: tells the allocator that pages which were full once belong to everybody. Never
//! allocates or frees.
//!
//! Who frees a part of a tree is seldom who made it. mimalloc gives a page that was full, and has room again, back to
//! the thread that made it, so each lane and the control thread gather partly filled pages of every size, and whoever
//! allocates more at the moment takes new ones: resident memory grew from 1.17 to 1.28 times what was counted within
//! twenty turns of the budget. With none taken back, such pages lie where every thread looks before it takes a new one.

use std::ffi::{c_int, c_long};

// So that it is linked where it is not the allocator, too.
use mimalloc as _;

/// `mi_option_page_max_reclaim`: pages of a size that a thread may take back; its number in mimalloc 3.3.2.
const PAGE_MAX_RECLAIM: c_int = 41;

// SAFETY: as mimalloc.h declares it; a number that is no option does nothing.
unsafe extern "C" {
    /// Sets an option unless the environment has set it.
    safe fn mi_option_set_default(option: c_int, value: c_long);
}

/// Call before threads are born that allocate.
pub(super) fn share_pages() {
    mi_option_set_default(PAGE_MAX_RECLAIM, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    // SAFETY: as mimalloc.h declares it.
    unsafe extern "C" {
        safe fn mi_version() -> c_int;
    }

    #[test]
    fn the_option_has_its_number_in_this_version() {
        assert_eq!(mi_version(), 30302, "look PAGE_MAX_RECLAIM up in mimalloc.h (from 0), and measure the churn again");
    }
}
