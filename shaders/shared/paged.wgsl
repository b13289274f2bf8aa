// Where the key of a position lies: in slot s % slots, or where sequences share the slots, in those of the sequence's pages.
#import state

override PAGED: bool = false;

// `row`: where the row of the step state begins that tells of the sequence.
fn slot_of(row: u32, s: u32) -> u32 {
    if (PAGED) {
        return state[row + PAGES + s / PAGE] * PAGE + s % PAGE;
    }
    return s % params.slots;
}
