// Package line is the Go half of the line protocol of tests/interop/adapters/program.py.
package line

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

const (
	Patience          = 30 * time.Second
	SessionTimeout    = 10 * time.Second
	HeartbeatInterval = 200 * time.Millisecond
)

// Command is one line of input; which fields are set depends on Do.
type Command struct {
	Do         string            `json:"do"`
	Topic      string            `json:"topic"`
	Group      string            `json:"group"`
	Records    []Outgoing        `json:"records"`
	Codec      string            `json:"codec"`
	Acks       string            `json:"acks"`
	Idempotent bool              `json:"idempotent"`
	Starts     [][2]int64        `json:"starts"`
	Count      int               `json:"count"`
	Partition  int32             `json:"partition"`
	When       any               `json:"when"`
	Strategy   string            `json:"strategy"`
	InstanceID *string           `json:"instance_id"`
	Member     int               `json:"member"`
	Partitions json.RawMessage   `json:"partitions"` // a number or a list of numbers
	Offsets    [][2]int64        `json:"offsets"`
	Before     [][2]int64        `json:"before"`
	Configs    map[string]string `json:"configs"`
	Name       string            `json:"name"`
	Value      *string           `json:"value"`

	// Of transactions.
	ID        string     `json:"id"`
	TimeoutMs int        `json:"timeout_ms"`
	Source    string     `json:"source"`
	Producer  int        `json:"producer"`
	Commit    bool       `json:"commit"`
	Isolation string     `json:"isolation"`
	Ends      [][2]int64 `json:"ends"`
	LingerMs  int        `json:"linger_ms"`
}

// Outgoing is a record to be written. JSON carries its bytes as base64, which is Go's own way.
type Outgoing struct {
	Value     []byte   `json:"value"`
	Key       []byte   `json:"key"`
	Headers   []Header `json:"headers"`
	Partition *int32   `json:"partition"`
	Timestamp *int64   `json:"timestamp"`
}

// Header is a pair in JSON: [name, value].
type Header struct {
	Name  string
	Value []byte
}

func (h *Header) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&h.Name, &h.Value})
}

func (h Header) MarshalJSON() ([]byte, error) { return json.Marshal([]any{h.Name, h.Value}) }

// Record is a record as it was read: six fields in a list.
type Record struct {
	Partition  int32
	Offset     int64
	Timestamp  int64
	Key, Value []byte
	Headers    []Header
}

func (r Record) MarshalJSON() ([]byte, error) {
	headers := r.Headers
	if headers == nil {
		headers = []Header{}
	}
	return json.Marshal([]any{r.Partition, r.Offset, r.Timestamp, r.Key, r.Value, headers})
}

// Count is the number of partitions to be created.
func (c Command) PartitionCount() int32 {
	var count int32
	must(json.Unmarshal(c.Partitions, &count))
	return count
}

// PartitionList is the list of partitions that the command is about.
func (c Command) PartitionList() []int32 {
	var list []int32
	must(json.Unmarshal(c.Partitions, &list))
	return list
}

// Timestamp is the time asked for, or nothing if a place in the log is asked for by name.
func (c Command) Timestamp() (int64, bool) {
	at, isNumber := c.When.(float64)
	return int64(at), isNumber
}

// Member is a consumer in a group, seen from outside. Its methods may be called from any goroutine.
type Member struct {
	mutex   sync.Mutex
	owned   []int32
	revoked int
	records []Record
	failed  error
	leaving bool
	Close   func() // set by whoever made the member
}

func (m *Member) Assigned(partitions []int32) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.owned = append(m.owned, partitions...)
}

func (m *Member) Revoked(partitions []int32) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.owned = slices.DeleteFunc(m.owned, func(each int32) bool { return slices.Contains(partitions, each) })
	if !m.leaving {
		m.revoked += len(partitions)
	}
}

func (m *Member) Received(records ...Record) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.records = append(m.records, records...)
}

func (m *Member) Failed(err error) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.failed = err
}

func (m *Member) view() (any, error) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	fresh := append([]Record{}, m.records...)
	m.records = nil
	owned := append([]int32{}, m.owned...)
	return map[string]any{"partitions": owned, "revoked": m.revoked, "records": fresh}, m.failed
}

func (m *Member) leave() (any, error) {
	m.mutex.Lock()
	m.leaving = true
	m.mutex.Unlock()
	m.Close()
	view, err := m.view()
	return view.(map[string]any)["records"], err
}

// Handlers are what a program knows to do, by name.
type Handlers map[string]func(Command) (any, error)

// Serve answers commands until the input ends. join makes members; nameOf finds Kafka's name of an error.
func Serve(handlers Handlers, join func(Command) (*Member, error), nameOf func(error) string) {
	var members []*Member
	handlers["join"] = func(command Command) (any, error) {
		member, err := join(command)
		members = append(members, member)
		return len(members) - 1, err
	}
	handlers["member"] = func(command Command) (any, error) { return members[command.Member].view() }
	handlers["leave"] = func(command Command) (any, error) { return members[command.Member].leave() }
	Answer(handlers, nameOf)
}

// Refuse answers every command with an error, for a program that could not begin.
func Refuse(handlers Handlers, err error, nameOf func(error) string) {
	for name := range handlers {
		handlers[name] = func(Command) (any, error) { return nil, err }
	}
	Answer(handlers, nameOf)
}

// Answer answers commands until the input ends.
func Answer(handlers Handlers, nameOf func(error) string) {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var command Command
		must(json.Unmarshal(lines.Bytes(), &command))
		result, err := handlers[command.Do](command)
		if err != nil {
			must(answers.Encode(map[string]any{"error": nameOf(err), "message": err.Error()}))
		} else {
			must(answers.Encode(map[string]any{"result": result}))
		}
	}
}

func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("line protocol: %v", err))
	}
}
