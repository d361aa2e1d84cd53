//! The arithmetic of a staging ring: a buffer in equal segments that is written round and round. A segment is fenced
//! when it is left, and its fence is waited for when it is entered again.

/// Bytes to copy, and the fences around them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where in the ring.
    pub at: usize,
    /// How many bytes.
    pub len: usize,
    /// The segment whose fence is to be waited for first.
    pub entered: Option<usize>,
    /// The segment to fence afterwards.
    pub left: Option<usize>,
}

/// A place in the ring.
#[derive(Debug)]
pub(super) struct Cursor {
    segment: usize,
    segments: usize,
    at: usize,
}

/// Pieces begin at multiples of this: whole lines for the copy engine.
const ALIGN: usize = 256;

impl Cursor {
    /// For `segments` of `segment` bytes, a multiple of 256.
    pub fn new(segment: usize, segments: usize) -> Self {
        debug_assert!(segment.is_multiple_of(ALIGN) && segment > 0 && segments > 0);
        Self { segment, segments, at: 0 }
    }

    /// Room for up to `len` bytes, at least one, in one segment.
    pub fn take(&mut self, len: usize) -> Piece {
        let (at, segment) = (self.at, self.at / self.segment);
        let inside = at % self.segment;
        let len = len.min(self.segment - inside);
        self.at += len.next_multiple_of(ALIGN);
        let left = self.at.is_multiple_of(self.segment).then_some(segment);
        self.at %= self.segment * self.segments;
        Piece { at, len, entered: (inside == 0).then_some(segment), left }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_fenced_before_it_is_entered_again() {
        let mut cursor = Cursor::new(1024, 3);
        let (mut fenced, mut written, mut steps) = ([true; 3], 0usize, 0);
        for len in (1..).map(|i| i * 37 % 1500 + 1).take(400) {
            let mut rest = len;
            while rest > 0 {
                let piece = cursor.take(rest);
                assert!(piece.len > 0 && piece.at.is_multiple_of(ALIGN));
                assert_eq!(piece.at / 1024, (piece.at + piece.len - 1) / 1024);
                if let Some(s) = piece.entered {
                    assert!(fenced[s], "segment {s} entered without a fence behind it");
                    fenced[s] = false;
                }
                if let Some(s) = piece.left {
                    fenced[s] = true;
                }
                rest -= piece.len;
                written += piece.len;
                steps += 1;
            }
        }
        assert!(written > 30 * 3 * 1024 && steps > 400);
    }

    #[test]
    fn pieces_do_not_overlap_within_a_round() {
        let mut cursor = Cursor::new(512, 2);
        let pieces: Vec<_> = [100, 300, 5, 1, 511].map(|len| cursor.take(len)).into();
        assert_eq!(
            pieces.iter().map(|p| (p.at, p.len)).collect::<Vec<_>>(),
            [(0, 100), (256, 256), (512, 5), (768, 1), (0, 511)]
        );
        assert_eq!(pieces[1].left, Some(0));
        assert_eq!((pieces[3].left, pieces[4].entered), (Some(1), Some(0)));
    }
}
