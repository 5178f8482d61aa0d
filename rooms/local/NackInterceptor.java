package rooms;

import java.lang.invoke.MethodHandles;
import java.lang.reflect.Field;
import java.util.List;
import java.util.Map;

import org.apache.activemq.artemis.api.core.ActiveMQException;
import org.apache.activemq.artemis.api.core.Message;
import org.apache.activemq.artemis.api.core.SimpleString;
import org.apache.activemq.artemis.core.persistence.StorageManager;
import org.apache.activemq.artemis.core.persistence.impl.journal.LargeServerMessageImpl;
import org.apache.activemq.artemis.core.postoffice.RoutingStatus;
import org.apache.activemq.artemis.core.protocol.stomp.ActiveMQStompException;
import org.apache.activemq.artemis.core.protocol.stomp.Stomp;
import org.apache.activemq.artemis.core.protocol.stomp.StompConnection;
import org.apache.activemq.artemis.core.protocol.stomp.StompFrame;
import org.apache.activemq.artemis.core.protocol.stomp.StompFrameInterceptor;
import org.apache.activemq.artemis.core.protocol.stomp.StompSession;
import org.apache.activemq.artemis.core.protocol.stomp.StompSubscription;
import org.apache.activemq.artemis.core.server.ActiveMQServer;
import org.apache.activemq.artemis.core.server.MessageReference;
import org.apache.activemq.artemis.core.server.Queue;
import org.apache.activemq.artemis.core.server.RoutingContext;
import org.apache.activemq.artemis.core.server.ServerConsumer;
import org.apache.activemq.artemis.core.server.ServerSession;
import org.apache.activemq.artemis.core.server.impl.RoutingContextImpl;
import org.apache.activemq.artemis.core.transaction.Transaction;
import org.apache.activemq.artemis.spi.core.protocol.RemotingConnection;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Copies what a STOMP client rejects by NACK to the dead-letter address.
 *
 * <p>Artemis handles a NACK as an ACK, and so destroys the message. The copy is sent in the transaction in
 * which the broker then acknowledges the original: both happen or neither. A NACK without a copy never
 * reaches the broker: the connection is closed, and the client receives the message again.
 */
public final class NackInterceptor implements StompFrameInterceptor {

   private static final Logger LOG = LoggerFactory.getLogger(MethodHandles.lookup().lookupClass());
   private static final Field SUBSCRIPTIONS = subscriptionsField();
   // What one NACK of an ack:client subscription may copy, in one transaction on the connection's thread.
   private static final int MAX_MESSAGES = 1000;
   private static final long MAX_BYTES = 32L * 1024 * 1024;

   // The acknowledgement mode of a subscription is not public. Without it the broker must not start.
   private static Field subscriptionsField() {
      try {
         Field field = StompSession.class.getDeclaredField("subscriptions");
         field.setAccessible(true);
         return field;
      } catch (NoSuchFieldException e) {
         throw new IllegalStateException(
            "this version of Artemis keeps the subscriptions of a STOMP session elsewhere", e);
      }
   }

   @Override
   public boolean intercept(StompFrame frame, RemotingConnection connection) {
      if (!Stomp.Commands.NACK.equals(frame.getCommand())) {
         return true;
      }
      StompConnection stomp = (StompConnection) connection;
      // The broker answers with an error: before CONNECT, after the end, and in STOMP 1.0, which has no NACK.
      if (!stomp.isValid() || stomp.getVersion().equals("1.0")) {
         return true;
      }
      try {
         copyRejected(frame, stomp);
         return true;
      } catch (IllegalArgumentException e) {
         // Without its text, which is the client's.
         LOG.warn("a NACK of {} names no message of its connection, which is closed", connection.getRemoteAddress());
         refuse(frame, stomp, "this connection has no such message");
      } catch (Exception | LinkageError e) {
         LOG.error("a NACK of {} cannot be handled; its connection is closed", connection.getRemoteAddress(), e);
         refuse(frame, stomp, "this message cannot be rejected now");
      }
      return false;
   }

   // It must not throw: the broker would log that, and handle the NACK as if there were no interceptor.
   private static void refuse(StompFrame frame, StompConnection stomp, String reason) {
      try {
         stomp.sendFrame(toError(frame, stomp, reason), null);
      } catch (RuntimeException e) {
         LOG.error("the refusal of a NACK cannot be sent", e);
         stomp.destroy();
      }
   }

   private static StompFrame toError(StompFrame frame, StompConnection stomp, String reason) {
      ActiveMQStompException error = new ActiveMQStompException(stomp, reason);
      error.setBody("Nothing was rejected. The broker's log has the reason.");
      error.setDisconnect(true);
      StompFrame answer = error.getFrame();
      if (frame.hasHeader(Stomp.Headers.RECEIPT_REQUESTED)) {
         answer.addHeader(Stomp.Headers.Response.RECEIPT_ID, frame.getHeader(Stomp.Headers.RECEIPT_REQUESTED));
      }
      return answer;
   }

   private static void copyRejected(StompFrame frame, StompConnection stomp) throws Exception {
      // It must be read as the broker reads it: the message that is copied is the one that it acknowledges.
      boolean byMessage = stomp.getVersion().equals("1.1");
      String ack = frame.getHeader(byMessage ? Stomp.Headers.Ack.MESSAGE_ID : Stomp.Headers.Ack.ID);
      String[] ids = String.valueOf(ack).split(",", -1);
      require(ids.length == 2, ack);
      long consumerId = Long.parseLong(ids[0]);
      long messageId = Long.parseLong(ids[1]);
      StompSession session = stomp.getSession();
      ServerSession core = session.getCoreSession();
      StompSubscription subscription = ((Map<?, StompSubscription>) SUBSCRIPTIONS.get(session)).get(consumerId);
      ServerConsumer consumer = core.locateConsumer(consumerId);
      require(subscription != null && consumer != null, ack);
      require(!byMessage || subscription.getID().equals(frame.getHeader(Stomp.Headers.Ack.SUBSCRIPTION)), ack);
      boolean single = subscription.getAck().equals(Stomp.Headers.Subscribe.AckModeValues.CLIENT_INDIVIDUAL);
      List<MessageReference> rejected = consumer.scanDeliveringReferences(
         false, reference -> !single || id(reference) == messageId, reference -> id(reference) == messageId);
      require(!rejected.isEmpty() && id(rejected.get(rejected.size() - 1)) == messageId, ack);
      requireFew(rejected);
      ActiveMQServer server = stomp.getManager().getServer();
      // The end of a connection rolls its transaction back in another thread.
      synchronized (core) {
         Transaction transaction = core.getCurrentTransaction();
         try {
            for (MessageReference reference : rejected) {
               copy(reference, transaction, server);
            }
         } catch (Exception | LinkageError e) {
            // Frames that follow in the same packet must not commit a part of the copies.
            transaction.markAsRollbackOnly(new ActiveMQException(e.toString()));
            throw new IllegalStateException("the rejected message cannot be copied", e);
         }
      }
   }

   private static void require(boolean holds, String ack) {
      if (!holds) {
         throw new IllegalArgumentException(ack);
      }
   }

   private static void requireFew(List<MessageReference> rejected) {
      long bytes = 0;
      for (MessageReference reference : rejected) {
         bytes += reference.getMessage().getEncodeSize();
      }
      if (rejected.size() > 1 && (rejected.size() > MAX_MESSAGES || bytes > MAX_BYTES)) {
         throw new IllegalStateException("a NACK would reject " + rejected.size() + " messages of " + bytes + " bytes");
      }
   }

   private static void copy(MessageReference reference, Transaction transaction, ActiveMQServer server)
      throws Exception {
      Queue queue = reference.getQueue();
      SimpleString address = queue.getDeadLetterAddress();
      if (address == null) {
         throw new IllegalStateException("the address " + queue.getAddress() + " has no dead-letter address");
      }
      StorageManager storage = server.getStorageManager();
      Message copy = reference.getMessage().copy(storage.generateID(), true);
      copy.setAddress(address);
      copy.referenceOriginalMessage(reference.getMessage(), queue.getName());
      copy.setExpiration(0);
      copy.setRoutingType(null);
      copy.reencode();
      copy = LargeServerMessageImpl.checkLargeMessage(copy, storage);
      RoutingContext context = new RoutingContextImpl(transaction);
      RoutingStatus status = server.getPostOffice().route(copy, context, false, false, null);
      // The status is also OK where the filters of all queues refuse it.
      if (status != RoutingStatus.OK || context.getQueueCount() == 0) {
         throw new IllegalStateException("no queue takes what is sent to " + address + ": " + status);
      }
   }

   private static long id(MessageReference reference) {
      return reference.getMessageID();
   }
}
