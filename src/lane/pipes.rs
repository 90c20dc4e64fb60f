//! Pipes that bytes of answers and bodies are moved through, one lane's own.
//!
//! Takes a cap, gives pipes while there are any. Never gives a pipe that holds bytes of somebody else's: one that is
//! not empty at the end is closed.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut};

use crate::lane::wire::Pipe;

/// A lane's pipes.
pub struct Pipes<P> {
    resting: RefCell<Vec<P>>,
    used: Cell<usize>,
    cap: Cell<usize>,
    bytes: usize,
}

impl<P: Pipe> Pipes<P> {
    /// Up to `cap` pipes, each asked to hold `bytes`; they are made when they are needed.
    pub fn new(cap: usize, bytes: usize) -> Self {
        Pipes { resting: RefCell::default(), used: Cell::new(0), cap: Cell::new(cap), bytes }
    }

    /// An empty pipe; none when all are in use, or when the system gives none.
    pub fn take(&self) -> Option<Taken<'_, P>> {
        if self.used.get() >= self.cap.get() {
            return None;
        }
        let rested = self.resting.borrow_mut().pop();
        let pipe = rested.or_else(|| P::open(self.bytes).ok())?;
        self.used.set(self.used.get() + 1);
        Some(Taken { pipe: Some(pipe), pipes: self })
    }

    /// From now on at most `cap`; those in use stay until they are given back.
    pub fn limit(&self, cap: usize) {
        self.cap.set(cap);
        self.resting.borrow_mut().truncate(cap);
    }

    /// Pipes in use.
    pub fn used(&self) -> usize {
        self.used.get()
    }

    /// Pipes that wait to be taken.
    pub fn resting(&self) -> usize {
        self.resting.borrow().len()
    }
}

/// A pipe in use; goes back on drop, or is closed when it holds bytes.
pub struct Taken<'a, P: Pipe> {
    pipe: Option<P>,
    pipes: &'a Pipes<P>,
}

impl<P: Pipe> Deref for Taken<'_, P> {
    type Target = P;
    fn deref(&self) -> &P {
        self.pipe.as_ref().expect("there until the drop")
    }
}

impl<P: Pipe> DerefMut for Taken<'_, P> {
    fn deref_mut(&mut self) -> &mut P {
        self.pipe.as_mut().expect("there until the drop")
    }
}

impl<P: Pipe> Drop for Taken<'_, P> {
    fn drop(&mut self) {
        self.pipes.used.set(self.pipes.used.get() - 1);
        self.pipes.resting.borrow_mut().extend(self.pipe.take().filter(|pipe| pipe.held() == 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    struct Counted(usize);

    impl Pipe for Counted {
        fn open(bytes: usize) -> io::Result<Self> {
            if bytes == 0 { Err(io::ErrorKind::Unsupported.into()) } else { Ok(Counted(0)) }
        }
        fn held(&self) -> usize {
            self.0
        }
    }

    #[test]
    fn pipes_are_capped_and_only_empty_ones_are_used_again() {
        let pipes = Pipes::<Counted>::new(2, 1);
        let (a, mut b) = (pipes.take().unwrap(), pipes.take().unwrap());
        assert!(pipes.take().is_none());
        b.0 = 5;
        drop((a, b));
        assert_eq!((pipes.used(), pipes.resting()), (0, 1));
        assert_eq!(pipes.take().unwrap().held(), 0);
        assert!(Pipes::<Counted>::new(0, 1).take().is_none());
        pipes.limit(0);
        assert!(pipes.resting() == 0 && pipes.take().is_none());
        pipes.limit(1);
        assert!(pipes.take().is_some());
        let none = Pipes::<Counted>::new(1, 0);
        assert!(none.take().is_none());
        assert_eq!(none.used(), 0);
    }
}
